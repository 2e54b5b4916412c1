"""Emulates an engine that takes the time of a real one and makes real trajectories, without a model: for tests of the
rest of the system.

It takes one denoising step at a time with continuous batching: a sample joins the running batch as soon as there is
room and leaves it after its last step. The policy's velocity is 0 in every version; transitions, noise and log-probs
are the real ones, so they agree with a recomputation that also uses velocity 0. Media are flat: one
colour or one level, derived from the seed. The engine waits for a request or a step's service time; `generate` and
`close` unblock it.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict

from omni_async.config.schema import Emulated
from omni_async.families import SamplingSpec
from omni_async.media import Media
from omni_async.rollout.base import EngineError, Trajectory
from omni_async.rollout.engine_task import EngineTask
from omni_async.rollout.payloads import Staged
from omni_async.rollout.staged import StagedVersion
from omni_async.rollout.stepping import InFlight, check_request, take_steps
from omni_async.sde.schedules import linear
from omni_async.types import SampleRequest, WeightManifest, WeightReport
from omni_async.version_spans import VersionSpans
from omni_async.weights.buckets import WeightError

if TYPE_CHECKING:
    import numpy as np


def flat_media(seed: int, spec: SamplingSpec) -> Media:
    """Returns media of the spec's shapes, of one colour or one level, which depend on the seed alone."""
    levels = torch.tensor(list(hashlib.blake2b(str(seed).encode(), digest_size=3).digest()), dtype=torch.uint8)
    parts: dict[str, Any] = {}
    for one in spec.media():
        if one.part == "audio":
            parts |= {"audio": torch.full(one.shape, int(levels[0]) / 255), "sample_rate": one.rate}
        else:
            parts[one.part] = levels[:, None, None].expand(one.shape).clone()
        if one.part == "video":
            parts["fps"] = one.rate
    return Media(**parts)


class EmulatedEngine:
    """A `RolloutEngine` without a model. `latent_shape(spec)`, `sigmas(steps, spec)` and `blank_conditioning(spec)` are
    a policy's methods, or stand in for them: what is returned then fits a real trainer of that policy."""

    def __init__(
        self,
        name: str,
        times: Emulated,
        *,
        max_batch: int,
        latent_shape: Callable[[SamplingSpec], tuple[int, ...]],
        blank_conditioning: Callable[[SamplingSpec], TensorDict] = lambda spec: TensorDict({}, batch_size=[]),
        sigmas: Callable[[int, SamplingSpec], torch.Tensor] = lambda steps, spec: linear(steps),
    ) -> None:
        self.name = name
        self._times = times
        self._max_batch = max_batch
        self._latent_shape = latent_shape
        self._blank_conditioning = blank_conditioning
        self._sigmas = sigmas
        self._version, self._digest = 0, ""
        self._staged: StagedVersion[Staged] = StagedVersion(name)
        self._waiting: deque[tuple[InFlight, asyncio.Future[Trajectory]]] = deque()
        self._running: list[tuple[InFlight, asyncio.Future[Trajectory]]] = []
        self._work = asyncio.Event()
        self._task = EngineTask(name, lambda: [result for _, result in (*self._running, *self._waiting)])

    async def start(self) -> WeightReport:
        self._task.start(self._run())
        return WeightReport(engine=self.name, version=self._version, digest=self._digest)

    async def generate(self, request: SampleRequest) -> Trajectory:
        check_request(request)
        self._task.require()
        sigmas = self._sigmas(request.num_inference_steps, request.spec)
        sample = InFlight(request, sigmas, self._latent_shape(request.spec))
        result: asyncio.Future[Trajectory] = asyncio.get_running_loop().create_future()
        self._waiting.append((sample, result))
        self._work.set()
        return await result

    async def stage(self, manifest: WeightManifest, buckets: list[np.ndarray]) -> str:
        started = time.perf_counter()
        try:
            await asyncio.to_thread(Staged(manifest, buckets).verify)
        except WeightError as error:
            raise EngineError(f"{self.name}: {error}") from error
        self._staged.put(manifest.version, Staged(manifest, buckets, time.perf_counter() - started))
        return manifest.digest

    async def swap(self, version: int) -> WeightReport:
        self._task.require()
        staged = self._staged.take(version)
        # Steps are computed between two awaits of the task, so this always falls between two steps.
        self._version, self._digest = version, staged.manifest.digest
        return WeightReport(engine=self.name, version=self._version, digest=self._digest, staged_s=staged.staged_s)

    async def close(self) -> None:
        await self._task.close()

    async def _run(self) -> None:
        while True:
            await self._iterate()

    async def _iterate(self) -> None:
        self._running = [(s, r) for s, r in self._running if not r.done()]
        while self._waiting and len(self._running) < self._max_batch:
            self._running.append(self._waiting.popleft())
        if not self._running:
            self._work.clear()
            await self._work.wait()
            return
        await asyncio.sleep(self._times.step_s + self._times.per_sample_s * (len(self._running) - 1))
        self._step()
        for sample, result in [pair for pair in self._running if pair[0].done]:
            await asyncio.sleep(self._times.decode_s)
            if not result.done():
                result.set_result(_trajectory(sample, self._blank_conditioning(sample.request.spec)))

    def _step(self) -> None:
        """Takes one step of everything running; samples of different shapes take theirs one shape after the other."""
        by_shape: dict[tuple[int, ...], list[InFlight]] = {}
        for sample, _ in self._running:
            by_shape.setdefault(sample.shape, []).append(sample)
        for shape, samples in by_shape.items():
            take_steps(samples, torch.zeros(len(samples), *shape), self._version)


def _trajectory(sample: InFlight, conditioning: TensorDict) -> Trajectory:
    request = sample.request
    tensors = sample.tensors(conditioning)
    return Trajectory(
        TensorDict(tensors, batch_size=[]),
        flat_media(request.seed, request.spec),
        VersionSpans.of(sample.versions),
    )
