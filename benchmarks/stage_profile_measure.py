"""Measures the time of each stage on one device, with the classes of a run in one process.

These are `DiffusersEngine` and `TrainEngine`. Every measurement ends when the device is idle. A batch too large for its
memory ends the series: larger ones are not tried.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from msgspec.structs import replace

from omni_async.algorithms.kinds import trajectory_fields
from omni_async.algorithms.registry import find_objective
from omni_async.config import Config
from omni_async.config.layout import ParallelLayout
from omni_async.diffusion.policy import Policy
from omni_async.rollout.base import EngineError, Trajectory
from omni_async.rollout.diffusers_engine import DiffusersEngine
from omni_async.training.engine import TrainEngine
from omni_async.training.groups import GroupBatch
from omni_async.types import Prompt, SampleRequest, SdeWindow, WeightManifest
from omni_async.weights.digest import Bucket

Say = Callable[[str], None]


class Timing(msgspec.Struct, frozen=True):
    """Seconds of every repeat of a job of `units`, and the device's peak memory (None if it does not count memory)."""

    units: int
    seconds: tuple[float, ...]
    peak_bytes: int | None

    @property
    def median_s(self) -> float:
        return sorted(self.seconds)[len(self.seconds) // 2]


class Publish(msgspec.Struct, frozen=True):
    """One version: its bytes, and seconds to export it from the trainer, check it at an engine, and swap to it."""

    nbytes: int
    export_s: float
    stage_s: float
    swap_s: float


class Measured(msgspec.Struct):
    """The measurements, filled stage by stage. Units are samples.

    `out_of_memory`: stage -> the first number of samples that did not fit."""

    device: str
    generate: list[Timing] = []
    recompute: list[Timing] = []
    train: list[Timing] = []
    step: list[Timing] = []
    publish: dict[str, Publish] = {}
    out_of_memory: dict[str, int] = {}
    trajectory_bytes: int = 0
    media_bytes: int = 0


@dataclass(frozen=True)
class Exported:
    manifest: WeightManifest
    buckets: list[Bucket]
    seconds: float


class Bench:
    """A benchmark of one engine and one trainer rank of `config` on `device`, which have to fit together.

    `done` is called after every stage."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        device: torch.device,
        *,
        repeats: int,
        say: Say,
        done: Callable[[Measured], None],
    ) -> None:
        self.measured = Measured(device=_device_name(device))
        self._config = config
        self._policy = policy
        self._device = device
        self._repeats = repeats
        self._say = say
        self._done = done

    async def run(self, batches: Sequence[int], train_batches: Sequence[int], payloads: Sequence[str]) -> Measured:
        rollout = self._config.rollout
        self._say("building the engine")
        engine = DiffusersEngine(
            "rollout-0",
            self._policy,
            dtype=getattr(torch, self._config.model.dtype),
            max_batch=max(*batches, *train_batches),
            device=self._device,
        )
        await engine.start()
        try:
            await self._generation(engine, batches)
            samples = await self._samples(engine, max(train_batches))
            self.measured.trajectory_bytes = _nbytes(samples[0].tensors)
            self.measured.media_bytes = samples[0].media.nbytes
            self._say(f"building the trainer (guidance {rollout.sampling.true_cfg_scale:g})")
            versions = self._training(samples, train_batches, payloads)
            self._free()
            for payload, exported in versions.items():
                await self._publish(engine, payload, exported)
        finally:
            await engine.close()
        return self.measured

    async def _publish(self, engine: DiffusersEngine, payload: str, exported: Exported) -> None:
        manifest = exported.manifest
        await engine.stage(manifest, exported.buckets)
        report = await engine.swap(manifest.version)
        taken = Publish(manifest.nbytes, exported.seconds, report.staged_s, report.swap_s)
        self.measured.publish[payload] = taken
        self._say(
            f"publish {payload}: {taken.nbytes / 1e9:.2f} GB, export {taken.export_s:.2f} s, stage {taken.stage_s:.2f}"
            f" s, swap {taken.swap_s:.2f} s"
        )
        self._done(self.measured)

    async def _generation(self, engine: DiffusersEngine, batches: Sequence[int]) -> None:
        for n in sorted(batches):
            laps = []
            try:
                for _ in range(1 + self._repeats):
                    with lap(self._device) as taken:
                        await self._generate(engine, range(n))
                    laps.append(taken)
            except EngineError as error:
                if not isinstance(error.__cause__, torch.OutOfMemoryError):
                    raise
                self._full("generate", n)
                break
            self._record("generate", n, laps)

    async def _samples(self, engine: DiffusersEngine, count: int) -> list[Trajectory]:
        """Generate samples to train on, in batches that are known to fit."""
        batch = self.measured.generate[-1].units
        made: list[Trajectory] = []
        for first in range(0, count, batch):
            made += await self._generate(engine, range(first, min(first + batch, count)))
        return made

    async def _generate(self, engine: DiffusersEngine, seeds: range) -> list[Trajectory]:
        """Generate one batch: concurrent calls share it."""
        return await asyncio.gather(*(engine.generate(self._request(seed)) for seed in seeds))

    def _training(
        self, samples: Sequence[Trajectory], batches: Sequence[int], payloads: Sequence[str]
    ) -> dict[str, Exported]:
        """Measure training and return a version of each payload. The trainer is gone when this returns."""
        engine = TrainEngine(self._config, self._policy, ParallelLayout(), device=self._device)
        engine.setup()
        versions = {}
        try:
            for n in sorted(batches):
                try:
                    self._train(engine, self._group(samples[:n]), n)
                except torch.OutOfMemoryError:
                    engine.discard()
                    self._full("train", n)
                    break
            self._free()
            for version, payload in enumerate(payloads, start=1):
                engine.config = replace(engine.config, weights=replace(engine.config.weights, payload=payload))
                versions[payload] = self._export(engine, version)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        return versions

    def _export(self, engine: TrainEngine, version: int) -> Exported:
        """Export into existing memory, as every publish of a run except the first."""
        buckets = engine.bucket_set()
        engine.snapshot(version, buckets)
        with lap(self._device) as taken:
            snapshot = engine.snapshot(version, buckets)
        assert snapshot is not None  # rank 0 has it
        return Exported(snapshot.manifest(), snapshot.buckets, taken.seconds)

    def _train(self, engine: TrainEngine, group: GroupBatch, n: int) -> None:
        rows = n * len(group.trajectories[0]["steps"])
        stages: dict[str, Callable[[], object]] = {
            "recompute": lambda: engine.recompute_proximal(group),
            "train": lambda: engine.accumulate(group, 1 / rows),
            "step": engine.step,
        }
        laps: dict[str, list[Lap]] = {name: [] for name in stages}
        for _ in range(1 + self._repeats):
            for name, stage in stages.items():
                with lap(self._device) as taken:
                    stage()
                laps[name].append(taken)
        for name in stages:
            self._record(name, 1 if name == "step" else n, laps[name])

    def _request(self, seed: int) -> SampleRequest:
        rollout = self._config.rollout
        assert rollout.sde is not None  # a recipe of a transition objective
        return SampleRequest(
            sample_id=f"sample-{seed}",
            kind="train",
            group=0,
            sample=seed,
            prompt=Prompt(0, "random"),
            seed=seed,
            spec=rollout.sampling,
            num_inference_steps=rollout.num_inference_steps,
            noise_level=rollout.sde.noise_level,
            sde_kind=rollout.sde.kind,
            window=SdeWindow(rollout.sde.window.range[0], rollout.sde.window.size),
            fields=trajectory_fields(find_objective(self._config.algorithm.name), self._config),
        )

    def _group(self, samples: Sequence[Trajectory]) -> GroupBatch:
        window = len(samples[0].tensors["steps"])
        return GroupBatch(
            group=0,
            spec=self._config.rollout.sampling,
            trajectories=[sample.tensors for sample in samples],
            advantages=[1.0 if i % 2 else -1.0 for i in range(len(samples))],
            seeds=range(len(samples)),
            staleness=[[0] * window for _ in samples],
            size=len(samples),
        )

    def _full(self, stage: str, n: int) -> None:
        """End a series. Raises RuntimeError if nothing smaller was measured."""
        if not getattr(self.measured, stage):
            raise RuntimeError(
                f"{stage}: {self.measured.device} has no memory for {n} samples, the smallest batch asked for"
            )
        self.measured.out_of_memory[stage] = n
        self._say(f"{stage}: {n} samples do not fit")
        self._free()

    def _free(self) -> None:
        gc.collect()
        if self._device.type != "cpu":
            torch.accelerator.empty_cache()

    def _record(self, stage: str, units: int, laps: Sequence[Lap]) -> None:
        """Record the laps, without the first, which warmed up."""
        peaks = [taken.peak_bytes for taken in laps[1:] if taken.peak_bytes is not None]
        timing = Timing(units, tuple(taken.seconds for taken in laps[1:]), max(peaks, default=None))
        getattr(self.measured, stage).append(timing)
        peak = f", {timing.peak_bytes / 2**30:.1f} GiB" if timing.peak_bytes is not None else ""
        self._say(f"{stage}: {units} in {timing.median_s:.3f} s{peak}")
        self._done(self.measured)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()


@dataclass
class Lap:
    seconds: float = 0.0
    peak_bytes: int | None = None


@contextmanager
def lap(device: torch.device) -> Iterator[Lap]:
    """Time the block until the device is idle again, and measure the device's peak memory (not on the CPU)."""
    taken, counts = Lap(), device.type != "cpu"
    if counts:
        torch.accelerator.synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
    started = time.perf_counter()
    yield taken
    if counts:
        torch.accelerator.synchronize(device)
        taken.peak_bytes = torch.accelerator.max_memory_allocated(device)
    taken.seconds = time.perf_counter() - started


def _nbytes(tensors: Any) -> int:
    """Count the bytes of all tensors, including nested ones."""
    return sum(value.nbytes for value in tensors.values(include_nested=True, leaves_only=True))
