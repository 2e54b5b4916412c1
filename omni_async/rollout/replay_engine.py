"""Implements an engine that replays a profile: no model and no torch, but real payloads, real versions and a device
that does one job at a time.

A job is a batch of waiting requests, at most `max_batch` samples; it takes the profile's time, spread evenly over the
denoising steps, and all its samples finish together. Every step is stamped with the version that took it; a swap falls
between two steps and pauses the engine. The engine waits for a request, a swap, or the device; `generate`, `swap` and
`close` unblock it.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omni_async.performance.device import Device
from omni_async.performance.media import SEED_BYTES, random_bytes, with_seed
from omni_async.performance.profile import Profile
from omni_async.rollout.base import EngineError, Trajectory
from omni_async.rollout.engine_task import EngineTask
from omni_async.rollout.staged import StagedVersion
from omni_async.types import SampleRequest, WeightManifest, WeightReport
from omni_async.version_spans import VersionSpans
from omni_async.weights.digest import WeightError, verify

if TYPE_CHECKING:
    import numpy as np

# Samples leased together arrive one by one, because messages take time that no device spends: samples that come within
# this time of the first, or this share of the job if that is shorter, belong to the same batch. The job is planned from
# the first sample's arrival all the same.
_INSTANT_S = 0.02
_INSTANT_SHARE = 0.05
# Trajectories are windows of one random buffer, at offsets below this many bytes; storing one copies it.
_OFFSETS = 4096


@dataclass
class _Waiting:
    """A request that waits for its sample. `arrived` is in the loop's time."""

    request: SampleRequest
    arrived: float
    made: asyncio.Future[Trajectory]


@dataclass
class _Swap:
    version: int
    asked: float
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class ReplayEngine:
    """A `RolloutEngine` that replays a profile. `seed` decides how long jobs take. `takes_turns`: the device also
    serves other roles, and taking new weights includes the time to switch to this one."""

    def __init__(self, name: str, profile: Profile, *, max_batch: int, seed: int, takes_turns: bool = False) -> None:
        self.name = name
        self._profile = profile
        self._max_batch = max_batch
        self._seed = seed
        self._takes_turns = takes_turns
        self._random = random.Random(f"{seed}/{name}")
        self._device = Device()
        self._trajectories = random_bytes(profile.payload.trajectory + _OFFSETS, seed)
        self._media = random_bytes(max(profile.payload.media, SEED_BYTES), seed)
        self._version, self._digest = 0, ""
        self._staged: StagedVersion[tuple[WeightManifest, float]] = StagedVersion(name)
        self._waiting: deque[_Waiting] = deque()
        self._running: list[_Waiting] = []
        self._swap: _Swap | None = None
        self._work = asyncio.Event()
        self._task = EngineTask(name, self._unanswered)

    async def start(self) -> WeightReport:
        self._task.start(self._run())
        return WeightReport(self.name, self._version, self._digest)

    async def generate(self, request: SampleRequest) -> Trajectory:
        self._task.require()
        loop = asyncio.get_running_loop()
        waiting = _Waiting(request, loop.time(), loop.create_future())
        self._waiting.append(waiting)
        self._work.set()
        return await waiting.made

    async def stage(self, manifest: WeightManifest, buckets: list[np.ndarray]) -> str:
        """Takes the profile's `publish` seconds, the time to check the digest included. EngineError if the bytes differ
        from the manifest."""
        self._task.require()
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            verify(manifest, buckets)
        except WeightError as error:
            raise EngineError(f"{self.name}: {error}") from error
        # A publish is over when every engine has the version: all engines draw the same time for it.
        seconds = self._profile.publish.sample(random.Random(f"{self._seed}/publish/{manifest.version}"))
        await asyncio.sleep(max(0.0, started + seconds - loop.time()))
        self._staged.put(manifest.version, (manifest, loop.time() - started))
        return manifest.digest

    async def swap(self, version: int) -> WeightReport:
        self._task.require()
        manifest, staged_s = self._staged.take(version)
        loop = asyncio.get_running_loop()
        self._swap = swap = _Swap(version, loop.time())
        self._work.set()
        await swap.done
        self._digest = manifest.digest
        return WeightReport(self.name, version, manifest.digest, staged_s, loop.time() - swap.asked)

    async def close(self) -> None:
        await self._task.close()

    async def _run(self) -> None:
        while True:
            if self._swap is not None:
                await self._switch(self._swap)
            elif self._waiting:
                await self._job()
            else:
                self._work.clear()
                await self._work.wait()

    def _unanswered(self) -> list[asyncio.Future[Any]]:
        swaps = [self._swap.done] if self._swap is not None else []
        return [waiting.made for waiting in (*self._running, *self._waiting)] + swaps

    async def _switch(self, swap: _Swap) -> None:
        seconds = self._profile.swap.sample(self._random)
        if self._takes_turns:
            seconds += self._profile.switch.sample(self._random)
        await self._device.busy(seconds, since=swap.asked)
        self._version, self._swap = swap.version, None
        if not swap.done.done():
            swap.done.set_result(None)

    async def _job(self) -> None:
        first = self._waiting[0]
        steps = first.request.num_inference_steps
        if len(self._waiting) < self._max_batch:
            await asyncio.sleep(min(_INSTANT_S, _INSTANT_SHARE * self._profile.generate.mean(self._max_batch)))
        while (
            self._waiting
            and len(self._running) < self._max_batch
            and self._waiting[0].request.num_inference_steps == steps
        ):
            self._running.append(self._waiting.popleft())
        each = self._profile.generate.sample(self._random, len(self._running)) / steps
        versions: list[int] = []
        for step in range(steps):
            if self._swap is not None:
                await self._switch(self._swap)
            versions.append(self._version)
            await self._device.busy(each, since=first.arrived if step == 0 else None)
        for sample in self._running:
            if not sample.made.done():
                sample.made.set_result(self._trajectory(sample.request.seed, VersionSpans.of(versions)))
        self._running.clear()

    def _trajectory(self, seed: int, versions: VersionSpans) -> Trajectory:
        offset = seed % _OFFSETS
        # Bytes instead of tensors: no code between this engine and an emulated rank or scorer reads them.
        tensors: Any = self._trajectories[offset : offset + self._profile.payload.trajectory]
        media: Any = with_seed(self._media, seed)
        return Trajectory(tensors, media, versions)
