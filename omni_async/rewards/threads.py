"""Provides threads for blocking calls; some of the calls never return.

Owns the threads, and waits for nothing.

A call gets an idle thread or a new one. A thread is idle again when its call returns, so calls that do not overlap
share one thread (and the data that libraries keep per thread). A thread cannot be stopped: a call that is given up
leaves it `busy`. The threads are daemons, so the process can end without them; the standard library's pool does not
allow that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from omni_async.aio.threads import DaemonThread

T = TypeVar("T")


class Threads:
    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[DaemonThread] = []
        self._busy: dict[asyncio.Future[Any], DaemonThread] = {}
        self._closed = False

    @property
    def busy(self) -> int:
        """The number of calls that have not returned."""
        return len(self._busy)

    def run(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Begin the call now.

        Give it up by dropping the future; cancelling it frees its thread for a second call too early."""
        thread = self._idle.pop() if self._idle else DaemonThread(self._name)
        future = asyncio.get_running_loop().run_in_executor(thread, call)
        self._busy[future] = thread
        future.add_done_callback(self._returned)
        return future

    def _returned(self, future: asyncio.Future[Any]) -> None:
        thread = self._busy.pop(future)
        if self._closed:
            thread.shutdown()
        else:
            self._idle.append(thread)

    def close(self) -> None:
        """End the idle threads. Calls that have not returned are left alone."""
        self._closed = True
        for thread in self._idle:
            thread.shutdown()
        self._idle.clear()
        for future in self._busy:
            future.cancel()  # otherwise its thread would wake a loop that may be closed by then
