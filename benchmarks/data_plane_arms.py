"""Defines the arms of the data-plane benchmark.

Each has its actors for one payload size; `run` moves samples from its producer to its trainer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import ray

from benchmarks import data_plane_ours as ours
from benchmarks import data_plane_transfer_queue as transfer
from benchmarks.data_plane_queues import ActorQueue, QueueProducer, QueueTrainer, RayQueue
from benchmarks.data_plane_work import in_flight
from benchmarks.local_ray import WAITING_CALLS
from omni_async.runtime.on_ray.shell import Proxy, actor_class


class Arm(Protocol):
    async def run(self, samples: int) -> float:
        """Return the seconds from the first call until the trainer has read the last sample.

        Raises RuntimeError if a sample was lost, duplicated or incomplete."""

    async def close(self) -> None: ...


class _Actors:
    """The actors of one arm, ended together."""

    def __init__(self) -> None:
        self._actors: list[Any] = []

    def spawn(self, name: str, build: Callable[[], Any]) -> Proxy:
        actor = actor_class().options(num_cpus=0).remote(build)
        self._actors.append(actor)
        return Proxy(name, actor, WAITING_CALLS)

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)


class Ours:
    """The run's own arm: a coordinator, a producer, a reward worker and a trainer, new roles for each run."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._actors = _Actors()
        names = ("coordinator", "producer", "rewarder", "trainer")
        self._coordinator, self._producer, self._rewarder, self._trainer = (
            self._actors.spawn(name, ours.Renewable) for name in names
        )

    async def run(self, samples: int) -> float:
        nbytes, coordinator, producer = self._nbytes, self._coordinator, self._producer
        await coordinator.phase(partial(ours.build_coordinator, nbytes, samples))
        await asyncio.gather(
            producer.phase(partial(ours.build_producer, nbytes, samples, coordinator)),
            self._rewarder.phase(partial(ours.build_rewarder, nbytes, samples, coordinator)),
            self._trainer.phase(partial(ours.build_trainer, nbytes, samples, coordinator, producer)),
        )
        began = time.perf_counter()
        others = asyncio.gather(producer.run(), self._rewarder.run())
        missing = await self._trainer.run()
        seconds = time.perf_counter() - began
        await others
        return _whole(missing, seconds)

    async def close(self) -> None:
        self._actors.close()


class QueueArm:
    def __init__(self, channel: RayQueue | ActorQueue, nbytes: int) -> None:
        self._channel = channel
        self._actors = _Actors()
        self._producer = self._actors.spawn("producer", partial(QueueProducer, channel, nbytes))
        self._trainer = self._actors.spawn("trainer", partial(QueueTrainer, channel, nbytes))

    async def run(self, samples: int) -> float:
        began = time.perf_counter()
        missing, _ = await asyncio.gather(self._trainer.run(samples), self._producer.run(samples))
        return _whole(missing, time.perf_counter() - began)

    async def close(self) -> None:
        self._actors.close()
        self._channel.close()


class TransferArm:
    """The TransferQueue arm. TransferQueue has one controller, so only one such arm can exist at a time."""

    def __init__(self, nbytes: int) -> None:
        transfer.open_queue()
        self._actors = _Actors()
        self._producer = self._actors.spawn("producer", partial(transfer.TransferProducer, nbytes))
        self._trainer = self._actors.spawn("trainer", partial(transfer.TransferTrainer, nbytes))
        self._runs = 0

    async def run(self, samples: int) -> float:
        self._runs += 1
        partition = f"run-{self._runs}"
        began = time.perf_counter()
        missing, _ = await asyncio.gather(self._trainer.run(samples, partition), self._producer.run(samples, partition))
        return _whole(missing, time.perf_counter() - began)

    async def close(self) -> None:
        self._actors.close()
        await asyncio.to_thread(transfer.close_queue)


def _whole(missing: int, seconds: float) -> float:
    if missing:
        raise RuntimeError(f"{missing} samples did not arrive")
    return seconds


OURS = "omni_async"
ARMS: dict[str, Callable[[int], Arm]] = {
    OURS: Ours,
    "actor queue": lambda nbytes: QueueArm(ActorQueue(in_flight(nbytes)), nbytes),
    "TransferQueue": TransferArm,
    "ray.util.queue": lambda nbytes: QueueArm(RayQueue(in_flight(nbytes)), nbytes),
}
