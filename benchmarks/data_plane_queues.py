"""Implements two queues of the data-plane benchmark: `ray.util.queue.Queue`, and an actor around an asyncio.Queue.

The queues receive values and return them. Producer and trainer keep as many calls in flight as in the other arms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Protocol

import ray
from ray.util.queue import Queue

from benchmarks.data_plane_work import CONCURRENT_PUTS, GROUP, Payload, Source, Tally


class Channel(Protocol):
    async def put(self, payload: Payload) -> None: ...
    async def get(self) -> Payload: ...


class RayQueue:
    def __init__(self, size: int) -> None:
        self._queue = Queue(maxsize=size, actor_options={"num_cpus": 0})

    async def put(self, payload: Payload) -> None:
        await self._queue.put_async(payload)

    async def get(self) -> Payload:
        taken: Payload = await self._queue.get_async()
        return taken

    def close(self) -> None:
        self._queue.shutdown(force=True)


class _ByValue:
    def __init__(self, size: int) -> None:
        self._queue: asyncio.Queue[Payload] = asyncio.Queue(size)

    async def put(self, payload: Payload) -> None:
        await self._queue.put(payload)

    async def get(self) -> Payload:
        return await self._queue.get()


class ActorQueue:
    def __init__(self, size: int) -> None:
        self._actor: Any = ray.remote(_ByValue).options(num_cpus=0).remote(size)

    async def put(self, payload: Payload) -> None:
        await self._actor.put.remote(payload)

    async def get(self) -> Payload:
        taken: Payload = await self._actor.get.remote()
        return taken

    def close(self) -> None:
        ray.kill(self._actor)


class QueueProducer:
    def __init__(self, channel: Channel, nbytes: int) -> None:
        self._channel = channel
        self._source = Source(nbytes)

    async def run(self, samples: int) -> None:
        numbers = iter(range(samples))
        await asyncio.gather(*(self._put_each(numbers) for _ in range(CONCURRENT_PUTS)))

    async def _put_each(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            await self._channel.put(self._source.payload(number))


class QueueTrainer:
    def __init__(self, channel: Channel, nbytes: int) -> None:
        self._channel = channel
        self._nbytes = nbytes

    async def run(self, samples: int) -> int:
        """Return the number of samples missing at the end: 0."""
        tally = Tally(self._nbytes, samples)
        wanted = iter(range(samples))
        await asyncio.gather(*(self._get_each(wanted, tally) for _ in range(GROUP)))
        return tally.left

    async def _get_each(self, wanted: Iterator[int], tally: Tally) -> None:
        for _ in wanted:
            tally.take(await self._channel.get())
