"""Calls blocking functions in daemon threads; the process can end before they return.

The standard library's executors join their threads when the loop or the interpreter ends, so a call that never returns
keeps the process alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


_Calls = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
_busy: set[Future[Any]] = set()


def busy() -> bool:
    """Return whether a call in a daemon thread is still running."""
    return bool(_busy)


class DaemonThread(Executor):
    """A thread that runs one call after another, and ends when this object is no longer referenced.

    Context variables of a call are those of its `submit`."""

    def __init__(self, name: str) -> None:
        self._calls: _Calls = SimpleQueue()
        self._closed = False
        weakref.finalize(self, self._calls.put, None)
        Thread(target=_work, args=(self._calls,), name=name, daemon=True).start()

    def submit(self, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[T] = Future()
        self._calls.put((future, partial(contextvars.copy_context().run, call, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the thread after its current call, if that returns; never wait for it."""
        self._closed = True
        with contextlib.suppress(Empty):
            while cancel_futures:
                if (item := self._calls.get_nowait()) is not None:
                    item[0].cancel()
        self._calls.put(None)


def _work(calls: _Calls) -> None:
    """Run calls until the queue yields None."""
    while (item := calls.get()) is not None:
        future, call = item
        if future.set_running_or_notify_cancel():
            _busy.add(future)
            value, error = None, None
            try:
                value = call()
            except BaseException as raised:  # noqa: BLE001 (it belongs to the awaiter of the future)
                error = raised
            _busy.discard(future)
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)
            del value, error  # an idle thread holds no result
        del item, future, call


class _Pool(Executor):
    """Runs each call in an idle thread or a new one; calls that do not overlap share a thread."""

    def __init__(self) -> None:
        self._idle: list[DaemonThread] = []

    def submit(self, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        try:
            thread = self._idle.pop()
        except IndexError:
            thread = DaemonThread("blocking call")

        def returned(_: Future[T]) -> None:
            self._idle.append(thread)

        future = thread.submit(call, *args, **kwargs)
        future.add_done_callback(returned)
        return future

    def forget(self) -> None:
        """Forget the threads: a forked process has none of them."""
        self._idle.clear()
        _busy.clear()


_POOL = _Pool()
os.register_at_fork(after_in_child=_POOL.forget)


async def in_daemon_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call in a daemon thread; return its result or raise its exception.

    A cancelled caller leaves the call behind in its thread. Context variables are the caller's."""
    return await asyncio.get_running_loop().run_in_executor(_POOL, partial(function, *args, **kwargs))
