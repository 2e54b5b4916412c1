"""Calls what blocks in a thread that no end of the process waits for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Return what a call returns that blocks, perhaps for ever, or raise what it raises.

    A thread whose caller is cancelled is left behind, which holds up neither the cancellation nor the end of the
    process."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def work() -> None:
        value, error = None, None
        try:
            value = function()
        except BaseException as raised:  # noqa: BLE001 (it is raised where it is waited for)
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is no waiter any more
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=work, daemon=True).start()
    return await result
