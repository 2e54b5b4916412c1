"""The weight publisher: carries each version that the trainer copied out to every engine, while generation and training go on.

Lives in the trainer's process, beside rank 0, on its event loop; digests and transports work in threads that are not the one that trains.
Waits for the trainer's `publish`; unblocked by it. One version is on its way at a time. One that is handed over meanwhile waits, and is
superseded by the next: engines only ever need the newest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from omni_async.actors.api import CoordinatorApi, ProducerApi
from omni_async.actors.tracer import Tracer
from omni_async.config import Config
from omni_async.control.clock import Clock
from omni_async.control.waiting import Bell
from omni_async.rollout.base import EngineError
from omni_async.types import WeightManifest
from omni_async.weights.snapshot import Snapshot
from omni_async.weights.transport.base import WeightSender


class WeightPublisher:
    def __init__(
        self, config: Config, producers: Mapping[str, ProducerApi], coordinator: CoordinatorApi, sender: WeightSender, clock: Clock
    ) -> None:
        self._config = config
        self._producers = producers
        self._coordinator = coordinator
        self._sender = sender
        self._tracer = Tracer("publisher", coordinator, clock)
        self._waiting: Snapshot | None = None
        self._bell = Bell()

    def withdraw(self) -> None:
        """Before an export: a version that was handed over but has not left is superseded, so its memory may be used again."""
        if self._waiting is not None:
            self._waiting.release()
            self._waiting = None

    def publish(self, snapshot: Snapshot) -> None:
        """Take over a version; everything that follows happens beside the training."""
        self.withdraw()
        self._waiting = snapshot
        self._bell.ring()

    async def run(self) -> None:
        """Until cancelled. EngineError if an engine does not take a version, TransportError if it can't be sent."""
        await self._sender.connect({name: producer.join_weights for name, producer in self._producers.items()})
        while True:
            while self._waiting is None:
                await self._bell.wait()
            snapshot, self._waiting = self._waiting, None
            with self._tracer.span("publish", version=snapshot.version, megabytes=round(snapshot.nbytes / 1e6, 3)):
                await self._carry(snapshot)
            snapshot.release()
            await self._tracer.flush()

    async def _carry(self, snapshot: Snapshot) -> None:
        manifest = await asyncio.to_thread(snapshot.manifest)
        await self._coordinator.announce(manifest.version, manifest.digest)
        async with self._sender.sending(manifest, snapshot.buckets) as parcel:
            await self._deliver_to_all(manifest, parcel)

    async def _deliver_to_all(self, manifest: WeightManifest, parcel: object) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for name, producer in self._producers.items():
                    tasks.create_task(self._deliver(name, producer, manifest, parcel))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None  # one engine without the weights is enough

    async def _deliver(self, name: str, producer: ProducerApi, manifest: WeightManifest, parcel: object) -> None:
        try:
            async with asyncio.timeout(self._config.weights.timeout_s) as deadline:
                report = await producer.receive_weights(manifest, parcel)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise EngineError(
                f"{name} did not hold version {manifest.version} within weights.timeout_s = {self._config.weights.timeout_s}"
            ) from None
        await self._coordinator.engine_holds(report)
