"""Runs a test's coroutine on an event loop of its own, on which nothing may be lost."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

STRANDED_AFTER_S = 100.0


async def settle() -> None:
    """Give the loop enough turns for everything that can happen to have happened."""
    for _ in range(60):
        await asyncio.sleep(0)


def play(work: Coroutine[Any, Any, None], run: Callable[[Coroutine[Any, Any, None]], Any] = asyncio.run) -> None:
    """Run a test's coroutine; fail if anything is left on the loop or if an exception was lost."""
    lost: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
        async with asyncio.timeout(STRANDED_AFTER_S if run is asyncio.run else None):
            await work
        await settle()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"left running: {left}"

    run(main())
    gc.collect(1)
    assert not lost, lost
