from __future__ import annotations

import asyncio
import os
import threading
from contextvars import ContextVar

import pytest

from omni_async.aio.threads import _POOL, DaemonThread, busy, in_daemon_thread
from tests.support.patience import PATIENCE


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
    assert busy()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not ended.is_set()
    release.set()  # its answer has nobody to go to
    assert ended.wait(PATIENCE)


async def test_calls_that_do_not_overlap_share_a_thread_and_have_the_callers_context() -> None:
    value: ContextVar[int] = ContextVar("value", default=0)
    value.set(7)
    first = await in_daemon_thread(lambda a, *, b: (threading.get_ident(), a, b, value.get()), 1, b=2)
    assert first[1:] == (1, 2, 7)
    assert await in_daemon_thread(threading.get_ident) == first[0]


def test_a_thread_runs_calls_in_order_and_ends_with_its_owner() -> None:
    thread = DaemonThread("mine")
    done: list[int] = []
    futures = [thread.submit(done.append, number) for number in range(100)]
    futures[-1].result(PATIENCE)
    assert done == [*range(100)]
    [itself] = [one for one in threading.enumerate() if one.name == "mine"]
    del thread
    itself.join(PATIENCE)
    assert not itself.is_alive()


def test_a_call_has_the_context_of_its_submit() -> None:
    value: ContextVar[int] = ContextVar("value", default=0)
    thread = DaemonThread("mine")
    assert thread.submit(value.get).result(PATIENCE) == 0
    value.set(7)
    assert thread.submit(value.get).result(PATIENCE) == 7


def test_at_the_end_calls_that_wait_are_cancelled_and_others_refused() -> None:
    thread, release = DaemonThread("mine"), threading.Event()
    running, waiting = thread.submit(release.wait), thread.submit(int)
    while not running.running():
        pass
    thread.shutdown(wait=False, cancel_futures=True)
    release.set()
    assert running.result(PATIENCE) and waiting.cancelled()
    with pytest.raises(RuntimeError, match="after shutdown"):
        thread.submit(int)


async def test_a_forked_process_has_threads_of_its_own() -> None:
    """Idle threads of its parent do not exist there: a call to one would never return."""
    await in_daemon_thread(int)
    child = os.fork()
    if child == 0:
        answered = _POOL.submit(int).exception(PATIENCE) is None
        os._exit(0 if answered else 1)
    assert await in_daemon_thread(os.waitpid, child, 0) == (child, 0)
