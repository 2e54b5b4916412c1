"""Sends together the items that arrive together: for calls that cost as much for one item as for many.

Owns the waiting items and one delivery under way. `send` waits for its item's delivery; a delivery waits for nothing
but itself, and the next one starts when it ends, with all items that came meanwhile. Nothing is held back to fill a
batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Coalescer(Generic[T, R]):
    """A batching front of `deliver`, which takes items and returns one result for each, in their order.

    An error that `deliver` raises goes to all their senders. A sender that is cancelled withdraws its item unless that
    has left."""

    def __init__(self, deliver: Callable[[list[T]], Awaitable[Sequence[R]]]) -> None:
        self._deliver = deliver
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []
        self._delivering: asyncio.Task[None] | None = None  # ends by itself when nothing waits

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
