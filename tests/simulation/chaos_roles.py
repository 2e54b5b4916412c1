"""Holds stand-ins for what the real roles of a simulated job use: an engine, a scorer, a trainer rank, a store,
checkpoints in memory. Small, and working.

Each runs in a `Process`, takes random times through it, and checks what it is given. They share a `World`: see
chaos_world.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from omni_async.config import Config
from omni_async.control.control_state import ControlState, Unfinished
from omni_async.rewards.base import ScoreError
from omni_async.rewards.loaded import LoadedReward
from omni_async.roles.api import Tracer
from omni_async.roles.checkpointer import Checkpointer
from omni_async.roles.rewarder import Rewarder
from omni_async.roles.trainer import Trainer
from omni_async.rollout.base import Trajectory
from omni_async.store import ObjectLost
from omni_async.types import (
    Answer,
    Piece,
    Prompt,
    ReadyGroup,
    SampleDrift,
    SampleRequest,
    Score,
    ScoreJob,
    TensorSpec,
    TrainGroup,
    VersionSpans,
    WeightManifest,
    WeightReport,
)
from omni_async.weights.digest import verify
from omni_async.weights.snapshot import Snapshot
from tests.simulation.chaos_network import Process

if TYPE_CHECKING:
    from tests.simulation.chaos_world import World


class Made(NamedTuple):
    """A trajectory: the request it was made from, and the versions that made it."""

    request: SampleRequest
    versions: tuple[int, ...]
    nbytes: int = 8


class Reference(NamedTuple):
    owner: Process
    value: Any


class Store:
    """The store as one process sees it: objects that it puts are lost with it, if the world says so."""

    def __init__(self, process: Process, world: World) -> None:
        self._process, self._world = process, world

    async def put(self, value: Any) -> Reference:
        await self._process.pause(self._world.seconds_of("store"))
        return Reference(self._process, value)

    async def put_all(self, values: Sequence[Any]) -> list[Reference]:
        await self._process.pause(self._world.seconds_of("store"))
        return [Reference(self._process, value) for value in values]

    async def get(self, reference: Reference) -> Any:
        await self._process.pause(self._world.seconds_of("store"))
        if reference.owner.dead and self._world.temper.store_dies:
            self._world.seen["object lost"] += 1
            raise ObjectLost(f"it was {reference.owner.name}'s")
        return reference.value


class Engine:
    """A `RolloutEngine` in which every step of every sample takes its own time."""

    def __init__(self, process: Process, world: World) -> None:
        self.name = process.name
        self._process, self._world = process, world
        self._version, self._staged = 0, WeightManifest(-1, "full", "", ())
        self.running = 0

    async def start(self) -> WeightReport:
        return WeightReport(self.name, 0, "")

    async def generate(self, request: SampleRequest) -> Trajectory:
        world = self._world
        world.check_request(request)
        self.running += 1
        most = world.config.rollout.max_inflight
        world.require(self.running <= most, f"{self.name} has {self.running} samples at once")
        try:
            versions = []
            for _ in range(request.num_inference_steps):
                await self._process.pause(world.step_s(request))
                versions.append(self._version)
            if world.generation_fails(request):
                raise ValueError("out of memory")
        finally:
            self.running -= 1
        by_one = world.config.weights.swap == "step" or len(set(versions)) == 1
        world.require(by_one, f"{request.sample_id} was made by {versions} although weights.swap waits for it")
        image = np.array([request.group, request.sample, request.prompt.index], np.int64)
        return Trajectory(Made(request, tuple(versions)), image, VersionSpans.of(versions))  # type: ignore[arg-type]

    async def stage(self, manifest: WeightManifest, buckets: list[np.ndarray]) -> str:
        verify(manifest, buckets)
        await self._process.do("staging", self._world.seconds_of("swap"))
        self._staged = manifest
        return manifest.digest

    async def swap(self, version: int) -> WeightReport:
        await self._process.do("swapping", self._world.seconds_of("swap"))
        staged = self._staged
        self._world.require(version == staged.version, f"{self.name} swaps to {version}, staged is {staged.version}")
        self._version = version
        return WeightReport(self.name, version, staged.digest)

    async def close(self) -> None:
        """Frees nothing."""


class Scorer:
    name = "chaos"

    def __init__(self, world: World) -> None:
        self._world = world

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        for image, prompt in zip(images, prompts, strict=True):
            self._world.require(image[2] == prompt.index, "an image was scored against another's prompt")
        if any(self._world.score_fails() for _ in images):
            raise ScoreError("unreadable")
        return [Score(self._world.reward(int(group), int(sample))) for group, sample, _ in images]


class SimulatedRewarder(Rewarder):
    """The real rewarder, without threads for its scorer and without the handling of scorers' faults."""

    def __init__(self, name: str, config: Config, scorer: Scorer, *args: Any) -> None:
        super().__init__(name, config, LoadedReward.of(config.reward, scorer), *args)
        self._scorer = scorer
        self._tracer = QuietTracer(name, self.coordinator, self.clock)

    async def _answer(self, job: ScoreJob, media: Any) -> Answer:
        try:
            return Answer(score=self._scorer.score([media], [job.prompt])[0])
        except ScoreError as error:
            return Answer(error=str(error))


class QuietTracer(Tracer):
    """A tracer that drops spans, because a timer that never ends would hide a deadlock."""

    def add(self, kind: str, start: float, end: float, **args: Any) -> None:
        pass

    async def flush_when_quiet(self, seconds: float) -> None:
        await asyncio.get_running_loop().create_future()


class Rank:
    """A `RankApi` that takes time over groups, and checks what it trains on."""

    def __init__(self, process: Process, world: World, store: Store) -> None:
        self._process, self._world, self._store = process, world, store
        self._fetched: set[int] = set()
        self._free: list[np.ndarray] = []

    async def setup(self, resume: str | None, rendezvous: str | None) -> None:
        """Loads nothing."""

    async def fetch(self, group: int, trajectories: Sequence[Any], start: int) -> None:
        self._process.doing.add("fetching")
        try:
            for trajectory in await asyncio.gather(*(self._store.get(reference) for reference in trajectories)):
                request = trajectory.request
                self._world.require(request.group == group, f"group {group} was given {request.sample_id}")
            self._fetched.add(group)
        finally:
            self._process.doing.discard("fetching")

    async def _do(self, what: str) -> None:
        await self._process.do(what, self._world.seconds_of("train"))

    async def recompute_proximal(self, batch: TrainGroup) -> list[SampleDrift]:
        await self._process.pause(self._world.seconds_of("train"))
        return []

    async def accumulate(self, batch: TrainGroup, row_weight: float) -> None:
        self._world.require(batch.group in self._fetched, f"group {batch.group} was not fetched")
        await self._do("accumulating")

    async def step(self, grad_scale: float) -> dict[str, float]:
        await self._do("stepping")
        return {}

    async def discard(self) -> None:
        """Drops nothing: there are no gradients."""

    async def switch(self) -> None:
        """Switches nothing: there are no shared devices."""

    async def export(self, version: int) -> Snapshot | None:
        bucket = self._free.pop() if self._free else np.empty(8, np.uint8)
        bucket[:] = np.frombuffer(version.to_bytes(8, "little"), np.uint8)
        await self._do("exporting")
        spec = TensorSpec("w", "uint8", (8,), (Piece(0, 0, 8),))
        return Snapshot(version, "full", (spec,), [bucket], release=lambda: self._free.append(bucket))

    async def begin_save(self, folder: str) -> dict[str, Any]:
        await self._do("saving")
        return {}

    async def end_save(self) -> None:
        await self._do("writing")


class MemoryCheckpointer(Checkpointer):
    """A checkpointer that keeps whole checkpoints in memory."""

    keep: Callable[[ControlState], None]

    async def save(self, version: int) -> None:
        await self.settle(last=False)
        control = await self.coordinator.continuation()
        if control.version != version:
            return
        await asyncio.gather(*(rank.begin_save("") for rank in self.ranks))
        self._writing = asyncio.create_task(self._write_it(control), name=f"checkpoint {control.version}")

    async def _write_it(self, control: ControlState) -> None:
        await asyncio.gather(*(rank.end_save() for rank in self.ranks))
        ready, gone = [], []
        for group in control.ready:
            try:
                found = await asyncio.gather(*(self.store.get(sample.trajectory) for sample in group.samples))
                ready.append(_with_trajectories(group, found))
            except ObjectLost:
                gone.append(Unfinished(group.group))
        self.keep(replace(control, ready=tuple(ready), unfinished=(*control.unfinished, *gone)))

    async def take_up_from(self, control: ControlState) -> None:
        groups = []
        for group in control.ready:
            references = await self.store.put_all([sample.trajectory for sample in group.samples])
            groups.append(_with_trajectories(group, references))
        if groups:
            await self.coordinator.take_up(groups)


def _with_trajectories(group: ReadyGroup, trajectories: Sequence[Any]) -> ReadyGroup:
    pairs = zip(group.samples, trajectories, strict=True)
    return replace(group, samples=tuple(replace(sample, trajectory=one) for sample, one in pairs))


class SimulatedTrainer(Trainer):
    """The real trainer, except for where its checkpoints go and come from."""

    def __init__(self, keep: Callable[[ControlState], None], *args: Any) -> None:
        super().__init__(*args)
        self._tracer = QuietTracer("trainer", self.coordinator, self.clock)
        there = self._checkpointer
        self._checkpointer = self.memory = MemoryCheckpointer(
            there.config, there.ranks, there.rule, there.coordinator, there.store, there.checkpoints, self._tracer
        )
        self.memory.keep = keep

    async def start_from(self, control: ControlState) -> None:
        self._version = control.version
        await self.memory.take_up_from(control)
        await self.coordinator.require_fields(("latents",))
