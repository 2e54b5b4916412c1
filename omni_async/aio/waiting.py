"""Provides waits without polling and without lost wake-ups.

- `Event` is for a few waiters that each wait for another condition.
- `FairQueue` is for many waiters that would all take the same items.
- `first_of` and `unless` are for a caller that waits for one of several events.
- `Coalescer` is for calls that cost as much for one item as for many.
- `Outbox` is for items that may travel with another call.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Event:
    """A signal without a state: `await wait()` returns at the next `notify()`.

    Callers loop: check a condition, wait, check again. Between a check and its wait no other task runs, so no
    notification is missed. Every notification wakes all waiters, so a cancelled waiter loses none for the others."""

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


class _Waiter:
    __slots__ = ("caller", "woken")

    def __init__(self, caller: str) -> None:
        self.caller = caller
        self.woken = asyncio.get_running_loop().create_future()


class FairQueue:
    """A first-come, first-served queue.

    `await take(action, caller)` returns `action()`, called when the caller is first in the queue and `is_open()`, or
    when `caller` was evicted.

    `notify()` only ever wakes the first waiter, and costs nothing while the queue is empty or closed: code that may
    have opened it calls `notify()`. A waiter that leaves, served or cancelled, wakes the next, so an open queue
    advances on its own. Waiters receive nothing while they wait, so a cancelled waiter loses nothing."""

    def __init__(self, is_open: Callable[[], bool]) -> None:
        self._is_open = is_open
        self._waiters: deque[_Waiter] = deque()
        self._evicted: set[str] = set()

    async def take(self, action: Callable[[], T], caller: str = "") -> T:
        if (not self._waiters and self._is_open()) or caller in self._evicted:
            return action()
        waiter = _Waiter(caller)
        self._waiters.append(waiter)
        try:
            await waiter.woken
            while not (self._is_open() or caller in self._evicted):  # it was open at the notification
                waiter.woken = asyncio.get_running_loop().create_future()
                await waiter.woken
            return action()
        finally:
            self._waiters.remove(waiter)
            self.notify()

    def notify(self) -> None:
        """Wake the first waiter if the queue is open."""
        if self._waiters:
            woken = self._waiters[0].woken
            if not woken.done() and self._is_open():
                woken.set_result(None)

    def evict(self, caller: str) -> None:
        """End all waits of `caller`, now and later."""
        self._evicted.add(caller)
        for waiter in self._waiters:
            if waiter.caller == caller and not waiter.woken.done():
                waiter.woken.set_result(None)

    @property
    def waiting(self) -> int:
        return len(self._waiters)


def is_cancelled() -> bool:
    """Return whether a CancelledError targets the current task, as opposed to the work that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def cancel(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel the tasks that still run, and wait until each has really finished."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def all_of(works: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results of all. If one fails, cancel and await the others before raising its error."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel(tasks)


async def first_of(*works: Awaitable[Any]) -> None:
    """Wait until the first of `works` is done; raise its exception, and cancel and await the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await cancel(tasks)


class Stopped(Exception):
    """The awaited work was interrupted."""


async def unless(stop: Awaitable[Any], work: Awaitable[T]) -> T:
    """Return the result of `work`; raise Stopped if `stop` is done first.

    The other awaitable is cancelled and awaited."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop)
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Stopped
        if working.cancelled():  # otherwise the waiter would take it for its own cancellation
            raise RuntimeError("it was cancelled from within")
        return working.result()
    finally:
        await cancel((working, stopping))


class Coalescer(Generic[T, R]):
    """A queue in front of `deliver` that sends items together if they arrive together.

    `deliver` takes items and returns one result for each, in their order. `send` waits for its item's delivery. The
    next delivery starts when that ends, with all items that arrived in the meantime. No item waits for a batch to fill.

    An error from `deliver` is raised in all senders of its items. A cancelled sender withdraws its item unless delivery
    has begun."""

    def __init__(self, deliver: Callable[[list[T]], Awaitable[Sequence[R]]]) -> None:
        self._deliver = deliver
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []
        self._delivering: asyncio.Task[None] | None = None  # ends when nothing waits

    async def send(self, item: T) -> R:
        result: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, result))
        if self._delivering is None:
            self._delivering = asyncio.create_task(self._deliver_all())
        return await result

    async def _deliver_all(self) -> None:
        try:
            while self._waiting:
                leaving, self._waiting = [pair for pair in self._waiting if not pair[1].done()], []
                if leaving:
                    await self._deliver_these(leaving)
        finally:
            self._delivering = None

    async def _deliver_these(self, leaving: list[tuple[T, asyncio.Future[R]]]) -> None:
        try:
            results = await self._deliver([item for item, _ in leaving])
            for (_, future), result in zip(leaving, results, strict=True):
                if not future.done():
                    future.set_result(result)
        except Exception as error:  # noqa: BLE001 (raised in the senders, which wait for it)
            for _, future in leaving:
                if not future.done():
                    future.set_exception(error)


# A call that an item's completion triggers leaves within so many turns of the event loop.
_TURNS = 1


class Outbox(Generic[T]):
    """Items that leave with the caller's next call, made by `carry`, or soon with a call of `deliver`.

    `send` returns once the item has left. It waits a few turns of the event loop for a call that carries it, but never
    for time to pass, and not while a call is under way. Concurrent deliveries are combined as by `Coalescer`; an error
    of `deliver` is raised in the senders that wait for it."""

    def __init__(self, deliver: Callable[[list[T]], Awaitable[None]]) -> None:
        self._deliver = deliver
        self._items: list[T] = []
        self._carrying = False
        self._rest: Coalescer[None, None] = Coalescer(self._deliver_rest)

    async def carry(self, call: Callable[[list[T]], Awaitable[R]]) -> R:
        """Return the result of `call`, made with all items that have not left."""
        self._carrying = True
        try:
            return await call(self._take())
        finally:
            self._carrying = False

    async def send(self, item: T) -> None:
        self._items.append(item)
        for _ in range(0 if self._carrying else _TURNS):
            await asyncio.sleep(0)
            if not any(one is item for one in self._items):
                return
        await self._rest.send(None)

    def _take(self) -> list[T]:
        items, self._items = self._items, []
        return items

    async def _deliver_rest(self, senders: list[None]) -> list[None]:
        if items := self._take():
            await self._deliver(items)
        return senders
