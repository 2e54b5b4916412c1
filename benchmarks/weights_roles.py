"""Hosts trainer and engine of the weight benchmark, each in a Ray actor.

They are the run's own rank, publisher, producers and transports, without updates and without a coordinator. Every
transport has its own publisher and producer, so that publishes by different ones can alternate.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from omni_async.aio.clock import WallClock
from omni_async.config import Config
from omni_async.config.layout import ParallelLayout
from omni_async.control.requests import RequestFactory
from omni_async.diffusion.components import named_parameters
from omni_async.diffusion.policy import load_policy
from omni_async.plugins.families import PipelineFamily
from omni_async.roles.producer import Producer
from omni_async.roles.publisher import WeightPublisher
from omni_async.roles.rank import Rank
from omni_async.rollout.base import EngineError
from omni_async.rollout.factory import build_engine
from omni_async.runtime.on_ray.store import RayStore
from omni_async.training.engine import TrainEngine
from omni_async.types import Prompt, Span, WeightManifest, WeightReport
from omni_async.weights.buckets import digest_tensors
from omni_async.weights.digest import Bucket
from omni_async.weights.transport import build_receiver, build_sender

CPU = torch.device("cpu")


class PublishTimes(msgspec.Struct, frozen=True):
    """Seconds from the start of an export.

    `blocked`: until the trainer may continue. `swapped`: until the last engine has swapped. `staged` and `swap` are the
    slowest engine's own."""

    blocked: float
    swapped: float
    staged: float
    swap: float
    nbytes: int
    digest: str


class CopyTimes(msgspec.Struct, frozen=True):
    """Seconds of plain copies of the same bytes into memory that was used before.

    `tensors`: one by one, from their own memory. `blocks`: in large blocks; the C library may bypass the cache for
    these. `new`: in blocks, into new memory."""

    tensors: float
    blocks: float
    new: float


class Desk:
    """A stand-in for the coordinator, for publisher and producers.

    A version has arrived when `engines` of them hold it, or one is lost."""

    def __init__(self, engines: int = 0) -> None:
        self._engines = engines
        self.arrived = asyncio.Event()
        self.lost: str | None = None
        self.digest = ""
        self.reports: list[WeightReport] = []
        self.last_report = 0.0

    async def announce(self, version: int, digest: str) -> None:
        self.digest = digest
        self.reports.clear()

    async def engine_holds(self, report: WeightReport) -> None:
        if report.digest != self.digest:
            raise RuntimeError(f"{report.engine} holds digest {report.digest}, published was {self.digest}")
        self.reports.append(report)
        self.last_report = time.perf_counter()
        if len(self.reports) == self._engines:
            self.arrived.set()

    async def engine_lost(self, engine: str, reason: str) -> None:
        self.lost = f"{engine}: {reason}"
        self.arrived.set()

    async def report_spans(self, spans: list[Span]) -> None:
        """Discard the spans: nothing plots them."""


class EngineHost:
    """An engine behind one producer per transport."""

    def __init__(self, name: str, config: Config, family: PipelineFamily, transports: Sequence[str]) -> None:
        torch.set_num_threads(1)
        self._config = config
        self._engine = build_engine(config, name, family)
        store, desk = RayStore(), Desk()
        self._producers: dict[str, Producer] = {}
        for transport in transports:
            own = with_transport(config, transport)
            coordinator: Any = desk
            receiver = build_receiver(own, name, store)
            self._producers[transport] = Producer(name, own, self._engine, coordinator, store, WallClock(), receiver)

    async def start(self) -> None:
        await self._engine.start()

    async def join(self, transport: str, invitation: Any) -> None:
        await self._producers[transport].join_weights(invitation)

    async def receive(self, transport: str, manifest: WeightManifest, parcel: Any) -> WeightReport:
        return await self._producers[transport].receive_weights(manifest, parcel)

    async def digest(self) -> str:
        """Return the digest of the weights that the diffusers engine computes with."""
        return await asyncio.to_thread(digest_tensors, named_parameters(self._engine._components))  # type: ignore[attr-defined]

    async def generate(self, samples: int) -> float:
        """Return the seconds that `samples` training samples take, all requested at once."""
        factory, size = RequestFactory(self._config), self._config.rollout.group_size
        groups = range(-(-samples // size))
        requests = [r for g in groups for r in factory.training(g, Prompt(g, f"the digit {g % 10}"), factory.window(g))]
        started = time.perf_counter()
        await asyncio.gather(*(self._engine.generate(request) for request in requests[:samples]))
        return time.perf_counter() - started


class _Route:
    """An engine host, as the publisher of one transport uses it."""

    def __init__(self, host: Any, transport: str) -> None:
        self._host = host
        self._transport = transport

    async def join_weights(self, invitation: Any) -> None:
        await self._host.join(self._transport, invitation)

    async def receive_weights(self, manifest: WeightManifest, parcel: Any) -> WeightReport:
        report: WeightReport = await self._host.receive(self._transport, manifest, parcel)
        return report


class TrainerHost:
    """A trainer rank with one publisher per transport. `engines` are proxies of `EngineHost`s."""

    def __init__(
        self,
        config: Config,
        family: PipelineFamily,
        transports: Sequence[str],
        engines: dict[str, Any],
        folder: str,
        host: str,
    ) -> None:
        torch.set_num_threads(1)
        self._policy = load_policy(family, config.model.path)
        store = RayStore()
        alone = ParallelLayout()
        self._rank = Rank(alone, lambda: TrainEngine(config, self._policy, alone, CPU), store)
        self._desk = Desk(len(engines))
        coordinator: Any = self._desk
        self._publishers = {
            transport: WeightPublisher(
                with_transport(config, transport),
                {name: _Route(engine, transport) for name, engine in engines.items()},
                coordinator,
                build_sender(with_transport(config, transport), store, Path(folder), host),
                WallClock(),
            )
            for transport in transports
        }
        self._version = 0
        self._copy: list[Bucket] = []
        self._source: list[Bucket] = []
        self._repeating: asyncio.Task[None] | None = None
        self._enough = asyncio.Event()
        self._num_published = 0

    async def start(self) -> None:
        """Load the model, and let the engines join every transport."""
        await self._rank.setup(None, None)
        self._running = {name: asyncio.create_task(publisher.run()) for name, publisher in self._publishers.items()}

    async def nudge(self, size: float) -> str:
        """Change a sized model's trained weights; return the digest of all of them."""
        transformer = self._policy.transformer  # type: ignore[attr-defined]
        with torch.no_grad():
            for parameter in transformer.parameters():
                if parameter.requires_grad:
                    parameter.add_(size)
        return digest_tensors(named_parameters({"transformer": transformer}))

    async def publish(self, transport: str) -> PublishTimes:
        """Publish one version, from the export until every engine has swapped."""
        publisher, arrived = self._publishers[transport], self._desk.arrived
        arrived.clear()
        self._version += 1
        started = time.perf_counter()
        publisher.withdraw()
        snapshot = await self._rank.export(self._version)
        blocked = time.perf_counter() - started
        if snapshot is None:
            raise RuntimeError("rank 0 exported nothing")
        publisher.publish(snapshot)
        waiting = asyncio.create_task(arrived.wait())
        await asyncio.wait({waiting, self._running[transport]}, return_when=asyncio.FIRST_COMPLETED)
        if not arrived.is_set():
            waiting.cancel()
            await self._running[transport]  # it failed: this raises its own error
        if self._desk.lost is not None:
            raise EngineError(self._desk.lost)
        await publisher.retire()  # all transports use the same memory in turn
        self._source = snapshot.buckets
        self._num_published += 1
        return PublishTimes(
            blocked,
            self._desk.last_report - started,
            max((r.staged_s for r in self._desk.reports), default=0.0),
            max((r.swap_s for r in self._desk.reports), default=0.0),
            snapshot.nbytes,
            self._desk.digest,
        )

    async def copies(self) -> CopyTimes:
        """Time copies of the bytes published last; for a sized model."""
        return await asyncio.to_thread(self._copies)

    def _copies(self) -> CopyTimes:
        if [len(b) for b in self._copy] != [len(b) for b in self._source]:
            self._copy = [bucket.copy() for bucket in self._source]
        parameters = self._policy.transformer.parameters()  # type: ignore[attr-defined]
        trained = [p.detach().numpy().reshape(-1).view(np.uint8) for p in parameters if p.requires_grad]
        targets = _cut(self._copy, [len(tensor) for tensor in trained])
        return CopyTimes(
            tensors=_seconds(lambda: _copy(trained, targets)),
            blocks=_seconds(lambda: _copy(self._source, self._copy)),
            new=_seconds(lambda: [bucket.copy() for bucket in self._source]),
        )

    async def publish_repeatedly(self, transport: str, every_s: float) -> None:
        """Publish a version every so many seconds, or as soon as the last one has arrived, until `stop_publishing`."""
        self._num_published = 0
        self._enough.clear()

        async def repeat() -> None:
            while not self._enough.is_set():
                due = time.perf_counter() + every_s
                await self.publish(transport)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, due - time.perf_counter())):
                        await self._enough.wait()

        self._repeating = asyncio.create_task(repeat())

    async def stop_publishing(self) -> int:
        """Stop once the version in transfer has arrived; return the number of arrived versions."""
        self._enough.set()
        if self._repeating is not None:
            await self._repeating
        return self._num_published


def _copy(sources: Sequence[Bucket], targets: Sequence[Bucket]) -> None:
    for source, target in zip(sources, targets, strict=True):
        np.copyto(target, source)


def _cut(buckets: Sequence[Bucket], sizes: Sequence[int]) -> list[Bucket]:
    """Cut consecutive pieces of these sizes, each within a bucket."""
    pieces, number, end = [], 0, 0
    for size in sizes:
        if end + size > len(buckets[number]):
            number, end = number + 1, 0
        pieces.append(buckets[number][end : end + size])
        end += size
    return pieces


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    kept = work()
    taken = time.perf_counter() - started
    del kept  # freeing memory is not part of a copy
    return taken


def with_transport(config: Config, transport: str) -> Config:
    return msgspec.structs.replace(config, weights=msgspec.structs.replace(config.weights, transport=transport))
