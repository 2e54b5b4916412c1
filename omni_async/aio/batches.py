"""Forms batches from the items waiting now, never waits to fill a batch, and runs several batches concurrently.

Owns a task per batch; the end of a batch, or a new item, starts the next. `Load` computes how many items to accept. It
has no clock and no task, so simulated workers count as real workers do.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

# Enough for every bound on samples in memory.
UNLIMITED = 1_000_000
# The weight of the last batch in the mean time of an item.
_LAST = 0.25


class Load:
    """The load of a batch server: `waiting` items, and `running` batches of at most `concurrency`.

    `batch`: most items of a batch. `concurrency` None: any number of batches."""

    def __init__(self, batch: int, concurrency: int | None) -> None:
        self.batch = batch
        self.concurrency = UNLIMITED if concurrency is None else concurrency
        self.waiting = 0
        self.running = 0
        self.items_running = 0

    def room(self, coming: int) -> int:
        """Return how many more items could begin now; each waiting or `coming` item already takes a free batch."""
        free = self.concurrency - self.running
        return (free - min(free, self.waiting + coming)) * self.batch

    def bound(self, coming: int) -> int:
        """Return how many more items to accept, so that at most one round of batches waits."""
        return max(0, 2 * self.concurrency * self.batch - self.waiting - self.items_running - coming)

    def next_size(self, largest: int) -> int:
        """Return the size of the next batch: the waiting items, divided among all batches that could begin."""
        free = self.concurrency - self.running
        return min(largest, self.batch, math.ceil(self.waiting / free)) if free > 0 and self.waiting else 0


def room_of(loads: Sequence[Load], coming: int = 0) -> int:
    """Return how many more items to accept for servers that all process every item.

    At least one server could begin so many now, and no server would collect more than a round of its batches.

    Args:
        loads: the servers' loads.
        coming: accepted items that are on their way to all servers."""
    return min(max(load.room(coming) for load in loads), min(load.bound(coming) for load in loads))


class BatchSize:
    """The size of batches that take `latency_s` each, learnt from batch durations; `largest` without a target."""

    def __init__(self, largest: int, latency_s: float | None) -> None:
        self._largest = largest
        self._latency_s = latency_s
        self._item_s: float | None = None

    @property
    def now(self) -> int:
        """Return the most items that the next batch may have."""
        if self._latency_s is None:
            return self._largest
        if not self._item_s:
            return 1 if self._item_s is None else self._largest
        return max(1, min(self._largest, math.floor(self._latency_s / self._item_s)))

    def took(self, items: int, seconds: float) -> None:
        """Record how long a batch took."""
        item_s = seconds / items
        self._item_s = item_s if self._item_s is None else (1 - _LAST) * self._item_s + _LAST * item_s


class Batcher(Generic[T, R]):
    """A queue in front of `serve`, which takes a batch of items and returns a result for each.

    Items that are submitted in one turn of the event loop may share a batch. An error from `serve` is the result of
    every item of its batch; waiting items are unaffected."""

    def __init__(
        self, serve: Callable[[list[T]], Awaitable[Sequence[R]]], load: Load, latency_s: float | None = None
    ) -> None:
        self._serve = serve
        self.load = load
        self._size = BatchSize(load.batch, latency_s)
        self._waiting: deque[tuple[T, asyncio.Future[R]]] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._scheduled = False

    def submit(self, item: T) -> asyncio.Future[R]:
        """Queue an item and return its future result. Cancelling that withdraws the item unless its batch has begun."""
        result: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, result))
        self.load.waiting += 1
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._start)
        return result

    def _start(self) -> None:
        self._scheduled = False
        while self._waiting and self._waiting[0][1].done():
            self._drop()
        while size := self.load.next_size(self._size.now):
            batch: list[tuple[T, asyncio.Future[R]]] = []
            while self._waiting and len(batch) < size:
                item, result = self._drop()
                if not result.done():
                    batch.append((item, result))
            if batch:
                self.load.running += 1
                self.load.items_running += len(batch)
                task = asyncio.create_task(self._run(batch))
                self._running.add(task)
                task.add_done_callback(self._running.discard)

    def _drop(self) -> tuple[T, asyncio.Future[R]]:
        self.load.waiting -= 1
        return self._waiting.popleft()

    async def _run(self, batch: list[tuple[T, asyncio.Future[R]]]) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            results = await self._serve([item for item, _ in batch])
            for (_, future), result in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(result)
        except BaseException as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error) if isinstance(error, Exception) else future.cancel()
            if not isinstance(error, Exception):
                raise
        finally:
            self._size.took(len(batch), loop.time() - began)
            self.load.running -= 1
            self.load.items_running -= len(batch)
            self._start()

    async def close(self) -> None:
        """Cancel all running and waiting items."""
        for _, future in self._waiting:
            future.cancel()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
