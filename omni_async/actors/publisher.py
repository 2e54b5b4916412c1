"""The weight publisher: carries each published version to every engine, while generation and training go on.

Waits for the trainer's `publish`; unblocked by it. A version that is published while an older one is still on its way replaces what waits:
engines only ever need the newest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from omni_async.actors.api import CoordinatorApi, ProducerApi
from omni_async.actors.tracer import Tracer
from omni_async.config import Config
from omni_async.control.clock import Clock
from omni_async.control.waiting import Bell
from omni_async.rollout.base import EngineError
from omni_async.types import WeightManifest


class WeightPublisher:
    def __init__(self, config: Config, producers: Mapping[str, ProducerApi], coordinator: CoordinatorApi, clock: Clock) -> None:
        self._config = config
        self._producers = producers
        self._coordinator = coordinator
        self._tracer = Tracer("publisher", coordinator, clock)
        self._next: tuple[WeightManifest, list[Any]] | None = None
        self._bell = Bell()

    async def publish(self, manifest: WeightManifest, buckets: list[Any]) -> None:
        """Take over a version and return at once."""
        self._next = (manifest, buckets)
        self._bell.ring()

    async def run(self) -> None:
        """Until cancelled. Raises EngineError if an engine does not take a version."""
        while True:
            while self._next is None:
                await self._bell.wait()
            (manifest, buckets), self._next = self._next, None
            await self._coordinator.announce(manifest.version, manifest.digest)
            with self._tracer.span("publish", version=manifest.version, megabytes=round(manifest.nbytes / 1e6, 3)):
                await self._deliver_to_all(manifest, buckets)
            await self._tracer.flush()

    async def _deliver_to_all(self, manifest: WeightManifest, buckets: list[Any]) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for name, producer in self._producers.items():
                    tasks.create_task(self._deliver(name, producer, manifest, buckets))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None  # one engine without the weights is enough

    async def _deliver(self, name: str, producer: ProducerApi, manifest: WeightManifest, buckets: list[Any]) -> None:
        try:
            async with asyncio.timeout(self._config.weights.timeout_s) as deadline:
                report = await producer.receive_weights(manifest, buckets)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise EngineError(
                f"{name} did not hold version {manifest.version} within weights.timeout_s = {self._config.weights.timeout_s}"
            ) from None
        await self._coordinator.engine_holds(report)
