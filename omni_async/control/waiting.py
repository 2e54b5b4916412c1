"""Waiting without polling and without being forgotten: `Event` for few waiters who each look for something else,
`FairQueue` for many who would all take the same things; `first_of` and `unless` for whoever waits for one of several
ends."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Event:
    """`await wait()` returns at the next `ring()`. Callers loop: check a condition, wait, check again. Between a check
    and its wait no other task runs, so no ring is missed; a cancelled waiter takes nothing with it, because every ring
    wakes everyone."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        try:
            await future
        finally:
            if not future.done() or future.cancelled():
                self._waiters = [f for f in self._waiters if f is not future]

    def notify(self) -> None:
        waiters, self._waiters = self._waiters, []
        for future in waiters:
            if not future.done():
                future.set_result(None)

    @property
    def waiting(self) -> int:
        return len(self._waiters)


class _Turn:
    def __init__(self, who: str) -> None:
        self.who = who
        self.come = asyncio.get_running_loop().create_future()

    def call(self) -> None:
        if not self.come.done():
            self.come.set_result(None)


class FairQueue:
    """First come, first served: `await take(what, who)` is `what()`, called when the caller is first in the line and
    `is_open()`, or when `who` was sent home.

    Only the first is ever woken by `ring()`, which costs nothing while the line is empty or closed: whoever may have
    opened it rings. Who leaves, served or cancelled, wakes the next, so an open line moves on by itself. Nobody is
    handed anything while waiting, so a cancelled waiter loses nothing.
    """

    def __init__(self, is_open: Callable[[], bool]) -> None:
        self._is_open = is_open
        self._line: deque[_Turn] = deque()
        self._sent_home: set[str] = set()

    async def take(self, what: Callable[[], T], who: str = "") -> T:
        if (not self._line and self._is_open()) or who in self._sent_home:
            return what()
        turn = _Turn(who)
        self._line.append(turn)
        try:
            await turn.come
            while not (self._is_open() or who in self._sent_home):  # it was open when the ring came
                turn.come = asyncio.get_running_loop().create_future()
                await turn.come
            return what()
        finally:
            self._line.remove(turn)
            self.notify()

    def notify(self) -> None:
        """Wake the first in the line if it is open."""
        if self._line and not self._line[0].come.done() and self._is_open():
            self._line[0].call()

    def evict(self, who: str) -> None:
        """They wait no longer, and never again."""
        self._sent_home.add(who)
        for turn in self._line:
            if turn.who == who:
                turn.call()

    @property
    def waiting(self) -> int:
        return len(self._line)


def is_cancelled() -> bool:
    """Whether a CancelledError is meant for the task that caught it, as opposed to what it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def first_of(*works: Awaitable[Any]) -> None:
    """Until the first of them is done: its exception is raised, and the others are cancelled and waited for."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Stopped(Exception):
    """What was waited for was broken off."""


async def unless(stop: Awaitable[Any], work: Awaitable[T]) -> T:
    """What the work comes to, or Stopped if `stop` is done first; the other one is cancelled and waited for."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop)
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Stopped
        if working.cancelled():  # or whoever waits takes it for a cancellation of its own
            raise RuntimeError("it was cancelled from within")
        return working.result()
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
