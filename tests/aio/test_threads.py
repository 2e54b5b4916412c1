from __future__ import annotations

import asyncio
import threading

import pytest

from omni_async.aio.threads import in_daemon_thread
from tests.patience import PATIENCE


async def test_what_a_call_returns_or_raises_is_the_callers() -> None:
    assert await in_daemon_thread(lambda: threading.current_thread().daemon)
    with pytest.raises(ZeroDivisionError):
        await in_daemon_thread(lambda: 1 / 0)


async def test_a_cancelled_caller_leaves_a_call_behind_that_never_returns() -> None:
    loop, began = asyncio.get_running_loop(), asyncio.Event()
    release, ended = threading.Event(), threading.Event()

    def block() -> None:
        loop.call_soon_threadsafe(began.set)
        release.wait()
        ended.set()

    waiting = asyncio.create_task(in_daemon_thread(block))
    await began.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not ended.is_set()
    release.set()  # its answer has nobody to go to
    assert ended.wait(PATIENCE)
