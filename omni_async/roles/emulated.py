"""Replays a profile as reward worker, trainer rank and update rule.

They fetch the same objects as the real roles and are busy for the same time. Each has one device, and runs one job at a
time as a sleep on the event loop rather than in a thread, so they also run on a loop of virtual time. Imports no torch.
Waits for the object store and the device; only they unblock it. The emulated engine is `omni_async.rollout.emulated`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from omni_async.aio.clock import Clock
from omni_async.algorithms.kinds import samples_per_rank
from omni_async.config import Config
from omni_async.config.reward import Scorer
from omni_async.control.reward_formula import RewardFormula
from omni_async.media import Media
from omni_async.performance.emulation import (
    Device,
    Draws,
    random_bytes,
    seed_of,
    with_seed,
)
from omni_async.performance.profile import Profile
from omni_async.performance.scorer_lanes import scorer_lanes
from omni_async.rewards import base
from omni_async.rewards.loaded import LoadedReward
from omni_async.roles.api import Abandoned, CoordinatorForRewarder, Tracer
from omni_async.roles.plan import Plan
from omni_async.roles.rewarder import Rewarder
from omni_async.store import ObjectStore
from omni_async.types import (
    Answer,
    Piece,
    Prompt,
    ReadyGroup,
    SampleDrift,
    Score,
    ScoreJob,
    TensorSpec,
    TrainGroup,
)
from omni_async.weights.digest import Bucket
from omni_async.weights.snapshot import SharedRows, Snapshot

# A version's number is written into its first bucket, so that no two versions have the same bytes.
_VERSION_BYTES = 8


class EmulatedScorer(base.Scorer):
    """A scorer that takes the profile's time for every batch, and computes rewards from the seeds in the media.

    The rewards are uniform in [0, 1). Each concurrent call has its own device. `fetch_s` returns the fetch time of the
    media, which is part of the profile's time."""

    accepts = ("image",)

    def __init__(self, name: str, draws: Draws, concurrency: int | None, fetch_s: Callable[[], float]) -> None:
        self.name = name
        self.concurrency = concurrency
        self._draws = draws
        self._fetch_s = fetch_s
        self._idle: list[Device] = []

    async def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        device = self._idle.pop() if self._idle else Device()
        await device.busy(self._draws.seconds(f"score/{self.name}", len(media)), device.now() - self._fetch_s())
        self._idle.append(device)
        drawn = [hashlib.blake2b(str(seed_of(one.image)).encode(), digest_size=8).digest() for one in media]
        return [Score(int.from_bytes(one, "little") / 2**64) for one in drawn]


class EmulatedRewarder(Rewarder):
    """A reward worker whose scorers take the profile's times, including scorers in pools.

    If roles share devices, the first samples of an update wait until the device switches to this role."""

    def __init__(
        self,
        name: str,
        config: Config,
        profile: Profile,
        coordinator: CoordinatorForRewarder,
        store: ObjectStore,
        clock: Clock,
    ) -> None:
        self._draws = Draws(name, config.run.seed, profile)
        self._fetch_s = 0.0
        self._turn = -1
        self._switching: asyncio.Task[None] | None = None

        lanes = scorer_lanes(config, profile)
        left = iter(lanes)

        def emulated(_: Scorer, gpus: float) -> EmulatedScorer:
            lane = next(left)
            # A single scorer draws from the worker's random stream; several scorers have one stream each.
            draws = self._draws if lane.alone else Draws(f"{name}/{lane.label}", config.run.seed, profile)
            return EmulatedScorer(lane.label, draws, lane.concurrency, lambda: self._fetch_s)

        named = RewardFormula(config.reward).scorers
        scorers = tuple(
            replace(one, batch=lane.batch, concurrency=None, pool=None) for one, lane in zip(named, lanes, strict=True)
        )
        reward = LoadedReward.load(replace(config.reward, scorers=scorers), build=emulated)
        super().__init__(name, config, reward, coordinator, store, clock)

    async def _score_all(self, jobs: list[ScoreJob]) -> None:
        turn = jobs[0].group // self.config.trainer.groups_per_update
        if self.config.placement.reward_in_turn and turn != self._turn:
            self._turn = turn
            self._switching = asyncio.create_task(self._switch())
        if self._switching is not None:
            await self._switching
        await super()._score_all(jobs)

    async def _switch(self) -> None:
        with self._tracer.span("switch"):
            await asyncio.sleep(self._draws.seconds("switch"))

    async def _media(self, job: ScoreJob) -> Media | Answer:
        """Fetch the sample's bytes; the scorers only need its seed."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        fetched: Any = await super()._media(job)
        self._fetch_s = loop.time() - began
        if isinstance(fetched, Answer):
            return fetched
        try:
            seed = seed_of(fetched)
        except ValueError as error:
            return Answer(error=f"ValueError: {error}")
        return Media(image=with_seed(np.zeros(24, np.uint8), seed).reshape(3, 1, 8))


class EmulatedRank:
    """The only rank of an emulated trainer, whatever `trainer.workers`. See `RankApi`.

    For each group it is busy as long as the rank with the largest share."""

    def __init__(self, config: Config, profile: Profile, store: ObjectStore) -> None:
        self._config = config
        self._trajectory_bytes = profile.payload.trajectory
        self._store = store
        self._device = Device()
        self._draws = Draws("trainer", config.run.seed, profile)
        self._units = samples_per_rank(config)
        self._free: list[list[Bucket]] = []
        self._since: float | None = None  # when the fetch of the next computed group began
        self._weights = random_bytes(max(profile.payload.weights, _VERSION_BYTES), config.run.seed)

    async def setup(self, resume: str | None, rendezvous: str | None) -> None:
        """Do nothing: there is nothing to load."""

    async def fetch(self, group: int, trajectories: Sequence[Any], start: int) -> None:
        """Fetch all trajectories, as part of the following pass. Raises RuntimeError if a trajectory's size differs."""
        self._since = self._device.now()
        expected = self._trajectory_bytes
        for trajectory in await asyncio.gather(*(self._store.get(reference) for reference in trajectories)):
            if trajectory.nbytes != expected:
                raise RuntimeError(
                    f"group {group}: a trajectory of {trajectory.nbytes} bytes arrived, expected {expected}"
                )

    async def recompute_proximal(self, batch: TrainGroup) -> list[SampleDrift]:
        """Return an empty list: it computes no drift."""
        await self._pass("proximal")
        return []

    async def accumulate(self, batch: TrainGroup, row_weight: float) -> None:
        await self._pass("train")

    async def step(self, grad_scale: float) -> dict[str, float]:
        await self._device.busy(self._draws.seconds("step"), self._device.now())
        return {}

    async def discard(self) -> None:
        """Do nothing: there are no gradients."""

    async def switch(self) -> None:
        """Switch the device to the trainer."""
        await self._device.busy(self._draws.seconds("switch"), self._device.now())

    async def export(self, version: int) -> Snapshot | None:
        """Copy the payload into memory that no earlier version needs, as part of the profile's export time."""
        since = self._device.now()
        size = self._config.weights.bucket_mb * 2**20
        pieces = [self._weights[start : start + size] for start in range(0, len(self._weights), size)]
        buckets = self._free.pop() if self._free else [np.empty_like(piece) for piece in pieces]
        for bucket, piece in zip(buckets, pieces, strict=True):
            np.copyto(bucket, piece)
        buckets[0][:_VERSION_BYTES] = np.frombuffer(version.to_bytes(_VERSION_BYTES, "little"), np.uint8)
        specs = tuple(
            TensorSpec(f"bucket.{i}", "uint8", (len(bucket),), (Piece(i, 0, len(bucket)),))
            for i, bucket in enumerate(buckets)
        )
        await self._device.busy(self._draws.seconds("export"), since)
        return Snapshot(
            version, self._config.weights.payload, specs, buckets, release=partial(self._free.append, buckets)
        )

    async def share(self, version: int) -> SharedRows:
        """Raise RuntimeError: only rank 0 is emulated, and it holds every row."""
        raise RuntimeError("emulated ranks share no rows")

    async def begin_save(self, folder: str) -> dict[str, Any]:
        """Return no state: there are no weights."""
        return {}

    async def end_save(self) -> None:
        """Do nothing: `begin_save` started nothing."""

    async def _pass(self, stage: str) -> None:
        since, self._since = self._since, None
        seconds = self._draws.seconds(stage, self._units)
        await self._device.busy(seconds, self._device.now() if since is None else since)


@dataclass(eq=False)
class EmulatedRule:
    """A rule whose updates take time and change nothing; it has no state."""

    config: Config
    plan: Plan
    rank: EmulatedRank

    def begin(self, version: int, tracer: Tracer, preempt: Callable[[], bool] = lambda: False) -> EmulatedUpdate:
        return EmulatedUpdate(self.config, self.plan, self.rank, version, tracer, preempt)

    def learn(self, metrics: dict[str, float]) -> str | None:
        """Return None: metrics have no effect here."""

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Do nothing: there is no state."""


@dataclass(eq=False)
class EmulatedUpdate:
    """An update that processes groups on arrival if the plan streams, otherwise once all are in."""

    config: Config
    plan: Plan
    rank: EmulatedRank
    version: int
    tracer: Tracer
    preempt: Callable[[], bool]
    groups: list[ReadyGroup] = field(default_factory=list)
    _steps: int = 0

    @property
    def missing(self) -> int:
        return self.config.trainer.groups_per_update - len(self.groups)

    async def add(self, group: ReadyGroup) -> None:
        await self.rank.fetch(group.group, [sample.trajectory for sample in group.samples], 0)
        self.groups.append(group)
        if self.plan.mode != "collect":
            await self._begin_turn(first=len(self.groups) == 1)
            await self._recompute_proximal(group)
            await self._accumulate(group)

    async def finish(self) -> dict[str, float]:
        if self.plan.mode != "collect":
            await self._step()
            return {}
        await self._begin_turn(first=True)
        for group in self.groups:
            await self._recompute_proximal(group)
        for number, group in enumerate(self.groups, start=1):
            if self.preempt() and not self._steps:
                raise Abandoned
            await self._accumulate(group)
            if number % (len(self.groups) // self.config.trainer.steps_per_update) == 0:
                await self._step()
        return {}

    async def _begin_turn(self, first: bool) -> None:
        if first and self.config.placement.colocated:
            with self.tracer.span("switch", version=self.version):
                await self.rank.switch()

    async def _recompute_proximal(self, group: ReadyGroup) -> None:
        if self.plan.proximal:
            with self.tracer.span("proximal", version=self.version, group=group.group):
                await self.rank.recompute_proximal(_batch(group, self.version))

    async def _accumulate(self, group: ReadyGroup) -> None:
        with self.tracer.span("train", version=self.version, group=group.group):
            await self.rank.accumulate(_batch(group, self.version), 1.0)

    async def _step(self) -> None:
        with self.tracer.span("train", version=self.version, step=self._steps):
            await self.rank.step(1.0)
        self._steps += 1


def _batch(group: ReadyGroup, version: int) -> TrainGroup:
    """Return a group's batch without values: nothing is computed from it."""
    return TrainGroup(group.group, version, None, (), (), ())
