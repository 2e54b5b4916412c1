"""Implements an engine without a model, on a device with configured or recorded times.

Requests, versions and reports are real. `times` determines all durations. `ReplayedTimes` replays a profile, with jobs
that are batches of waiting requests that start and end together. `StepTimes` is `rollout.emulated`: running samples
take one denoising step at a time, and a sample joins as soon as there is room and leaves after its last step. `make`
determines the contents of a sample. `RandomPayload` returns bytes of a profile's sizes; `ZeroVelocity` of
`omni_async.rollout.stepping` makes real trajectories of a policy that does nothing. `TokenByToken` replays a profile's
times of answers: these join and leave as with `StepTimes`, and each has a length of its seed.

Every step is stamped with the version that took it, and a swap falls between two steps. The engine sleeps on the event
loop, never in a thread, so it also runs on a loop of virtual time. It waits for a request, a swap, or the device;
`generate`, `swap` and `close` unblock it. Imports no torch.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from omni_async.performance.emulation import SEED_BYTES, Device, Draws, random_bytes, with_seed
from omni_async.performance.profile import Payload, Profile, TokenTimes
from omni_async.rollout.base import EngineError, StagedVersion, Trajectory, require_whole
from omni_async.types import SampleRequest, VersionSpans, WeightManifest, WeightReport

if TYPE_CHECKING:
    import numpy as np

    from omni_async.config.rollout import Emulated

# Samples leased together arrive one at a time, because messages take time that no device spends. Samples that arrive
# within this time after the first, or this share of the job if that is shorter, belong to the same batch. The job is
# still planned from the first sample's arrival.
_INSTANT_S = 0.02
_INSTANT_SHARE = 0.05
# Trajectories are windows of one random buffer, at offsets below this many bytes; storing one copies it.
_OFFSETS = 4096

# Sums of floats may differ from the end of a step by this share of it.
_SAME_STEP = 1e-6

Make = Callable[[SampleRequest, VersionSpans], Trajectory]


class EngineTimes(ABC):
    """The seconds that an engine's device takes; only steps take time unless a method overrides it.

    `in_batches`: samples start together and end together, and `step` is called once for all steps of a batch; otherwise
    a sample joins and leaves at any step. `in_strides`: steps are so many that the engine wakes up only after a step
    that ends a sample, or lets another join. `gather`: how long the first sample waits for others."""

    in_batches = False
    in_strides = False
    gather = 0.0

    @abstractmethod
    def step(self, samples: int, num_steps: int) -> float:
        """Return the seconds of one denoising step, or token, of `samples` samples, of `num_steps` each."""

    def num_steps(self, request: SampleRequest) -> int:
        """Return the number of steps, or tokens, of a sample."""
        return request.num_inference_steps

    def prefill(self, samples: int) -> float:
        """Return the seconds until samples that join take their first step."""
        return 0.0

    def decode(self) -> float:
        return 0.0

    def stage(self, version: int) -> float:
        return 0.0

    def swap(self) -> float:
        return 0.0


class StepTimes(EngineTimes):
    """The times of the recipe's section `rollout.emulated`."""

    def __init__(self, times: Emulated) -> None:
        self._times = times

    def step(self, samples: int, num_steps: int) -> float:
        return self._times.step_s + self._times.per_sample_s * (samples - 1)

    def decode(self) -> float:
        return self._times.decode_s


class ReplayedTimes(EngineTimes):
    """A profile's times of the engine `name`.

    `takes_turns`: the device also serves other roles, and taking new weights includes the time to switch to this one.
    """

    in_batches = True

    def __init__(self, name: str, profile: Profile, seed: int, *, max_batch: int, takes_turns: bool = False) -> None:
        self._draws = Draws(name, seed, profile)
        self._profile = profile
        self._seed = seed
        self._takes_turns = takes_turns
        self.gather = min(_INSTANT_S, _INSTANT_SHARE * profile.generate.mean(max_batch))

    def step(self, samples: int, num_steps: int) -> float:
        return self._draws.seconds("generate", samples) / num_steps

    def stage(self, version: int) -> float:
        """Draw the time of a publish, the same on all engines, because it ends when every engine has the version."""
        return Draws(f"publish/{version}", self._seed, self._profile).seconds("publish")

    def swap(self) -> float:
        return self._draws.seconds("swap") + (self._draws.seconds("switch") if self._takes_turns else 0.0)


class TokenByToken(ReplayedTimes):
    """A profile's times of answers that the engine `name` draws token by token."""

    in_batches = False
    in_strides = True

    def __init__(self, name: str, profile: Profile, seed: int, tokens: TokenTimes, **options: Any) -> None:
        super().__init__(name, profile, seed, **options)
        self._tokens = tokens
        self.gather = 0.0

    def step(self, samples: int, num_steps: int) -> float:
        return self._draws.seconds("token", samples)

    def num_steps(self, request: SampleRequest) -> int:
        return self._tokens.length_of(request.seed)

    def prefill(self, samples: int) -> float:
        return self._draws.seconds("prefill", samples)


class RandomPayload:
    """Makes samples of random bytes, of a profile's sizes; media begin with the sample's seed."""

    def __init__(self, payload: Payload, seed: int) -> None:
        self._size = payload.trajectory
        self._trajectories = random_bytes(payload.trajectory + _OFFSETS, seed)
        self._media = random_bytes(max(payload.media, SEED_BYTES), seed)

    def __call__(self, request: SampleRequest, versions: VersionSpans) -> Trajectory:
        offset = request.seed % _OFFSETS
        # Bytes instead of tensors: no code between this engine and an emulated rank or scorer reads them.
        tensors: Any = self._trajectories[offset : offset + self._size]
        media: Any = with_seed(self._media, request.seed)
        return Trajectory(tensors, media, versions)


@dataclass
class _Sample:
    """A request that waits, and then runs. `arrived` is in the loop's time; `versions` took the steps so far."""

    request: SampleRequest
    arrived: float
    made: asyncio.Future[None]
    num_steps: int
    versions: list[int] = field(default_factory=list)

    @property
    def missing(self) -> int:
        return self.num_steps - len(self.versions)


class _Swap(NamedTuple):
    version: int
    asked: float
    done: asyncio.Future[None]


class EmulatedEngine:
    """A `RolloutEngine` of at most `max_batch` samples at a time."""

    def __init__(self, name: str, times: EngineTimes, make: Make, *, max_batch: int) -> None:
        self.name = name
        self._times = times
        self._make = make
        self._max_batch = max_batch
        self._device = Device()
        self._version, self._digest = 0, ""
        self._staged: StagedVersion[tuple[WeightManifest, float]] = StagedVersion(name)
        self._waiting: deque[_Sample] = deque()
        self._running: list[_Sample] = []
        self._step_s = 0.0  # of the running batch
        self._since: float | None = None  # when the batch could have started, until it starts
        self._swap: _Swap | None = None
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failure: str | None = None

    async def start(self) -> WeightReport:
        self._task = asyncio.create_task(self._serve(), name=f"{self.name}-runner")
        return WeightReport(self.name, self._version, self._digest)

    async def generate(self, request: SampleRequest) -> Trajectory:
        self._require_running()
        loop = asyncio.get_running_loop()
        sample = _Sample(request, loop.time(), loop.create_future(), self._times.num_steps(request))
        self._waiting.append(sample)
        self._work.set()
        await sample.made
        return self._make(request, VersionSpans.of(sample.versions))

    async def stage(self, manifest: WeightManifest, buckets: list[np.ndarray]) -> str:
        """Receive a version, for the time that `times` returns, including the time to check the digest.

        EngineError if the bytes differ from the manifest."""
        self._require_running()
        loop = asyncio.get_running_loop()
        started = loop.time()
        await require_whole(self.name, manifest, buckets)
        await asyncio.sleep(max(0.0, started + self._times.stage(manifest.version) - loop.time()))
        self._staged.put(manifest.version, (manifest, loop.time() - started))
        return manifest.digest

    async def swap(self, version: int) -> WeightReport:
        self._require_running()
        manifest, staged_s = self._staged.take(version)
        loop = asyncio.get_running_loop()
        self._swap = swap = _Swap(version, loop.time(), loop.create_future())
        self._work.set()
        await swap.done
        self._digest = manifest.digest
        return WeightReport(self.name, version, manifest.digest, staged_s, loop.time() - swap.asked)

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            self._fail_waiters()  # a task that is cancelled before its first step has failed none

    def _require_running(self) -> None:
        if self._task is None or self._task.done():
            raise EngineError(f"{self.name} is not running" + (f": {self._failure}" if self._failure else ""))

    async def _serve(self) -> None:
        try:
            await self._run()
        except Exception as error:  # noqa: BLE001 (reported to all waiters, and to later callers)
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            self._fail_waiters()

    def _fail_waiters(self) -> None:
        swaps = [self._swap.done] if self._swap is not None else []
        for future in [sample.made for sample in (*self._running, *self._waiting)] + swaps:
            if not future.done():
                future.set_exception(EngineError(f"{self.name} {self._failure or 'was closed'}"))

    async def _run(self) -> None:
        while True:
            if self._swap is not None:
                await self._switch(self._swap)
            elif self._running:
                await self._step()
            elif self._waiting:
                await self._begin()
            else:
                self._work.clear()
                await self._work.wait()

    async def _switch(self, swap: _Swap) -> None:
        await self._device.busy(self._times.swap(), since=swap.asked)
        self._version, self._swap = swap.version, None
        if not swap.done.done():
            swap.done.set_result(None)

    async def _begin(self) -> None:
        """Form a batch of waiting samples; they all have the same number of steps if they also end together."""
        self._since = self._waiting[0].arrived
        if len(self._waiting) < self._max_batch and self._times.gather:
            await asyncio.sleep(self._times.gather)
        self._join()
        if self._times.in_batches:
            self._step_s = self._times.step(len(self._running), self._running[0].num_steps)

    def _join(self) -> None:
        while self._waiting and len(self._running) < self._max_batch:
            steps = {sample.num_steps for sample in (self._waiting[0], *self._running[:1])}
            if self._times.in_batches and len(steps) > 1:
                return
            self._running.append(self._waiting.popleft())

    async def _step(self) -> None:
        """Take one denoising step of everything that runs, or all steps of a stride."""
        since, self._since = self._since, None
        if not self._times.in_batches:
            self._join()
            joined = sum(not sample.versions for sample in self._running)
            if seconds := self._times.prefill(joined) if joined else 0.0:
                await self._device.busy(seconds, since)
                since = None
            self._step_s = self._times.step(len(self._running), 1)
        num_steps = await self._stride(self._device.begins(since)) if self._times.in_strides else 1
        await self._device.busy(num_steps * self._step_s, since)
        for sample in self._running:
            sample.versions += [self._version] * num_steps
        for sample in [one for one in self._running if one.missing <= 0]:
            await self._decode(sample)

    async def _stride(self, start: float) -> int:
        """Wait for the last step, of those from `start` on, before a sample ends, a sample can join, or a swap.

        Returns the number of steps."""
        loop, most = asyncio.get_running_loop(), min(sample.missing for sample in self._running)
        try:
            async with asyncio.timeout_at(start + most * self._step_s):
                while self._swap is None and not (self._waiting and len(self._running) < self._max_batch):
                    self._work.clear()
                    await self._work.wait()
        except TimeoutError:
            return most
        begun = (loop.time() - start) / self._step_s if self._step_s else most
        return max(1, min(most, math.ceil(begun - _SAME_STEP)))

    async def _decode(self, sample: _Sample) -> None:
        if seconds := self._times.decode():
            await self._device.busy(seconds)
        self._running.remove(sample)
        if not sample.made.done():
            sample.made.set_result(None)
