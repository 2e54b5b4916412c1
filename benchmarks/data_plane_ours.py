"""Implements our own arm of the data-plane benchmark: the run's coordinator, producer and reward worker.

The engine and the scorer take no time, and the trainer fetches each group's trajectories. Every update is published, so
that the staleness budget is renewed as in a run.

Roles end with their run; an actor hosts new ones for the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from benchmarks.data_plane_work import CONCURRENT_PUTS, GROUP, Source, Tally, in_flight
from omni_async.aio.clock import WallClock
from omni_async.config import Config, check, with_spec
from omni_async.control.coordinator import Coordinator
from omni_async.media import Media
from omni_async.rewards.base import Scorer
from omni_async.rewards.loaded import LoadedReward
from omni_async.roles.producer import Producer
from omni_async.roles.rewarder import Rewarder
from omni_async.rollout.base import Trajectory
from omni_async.runtime.on_ray.store import RayStore
from omni_async.types import Prompt, SampleRequest, Score, UpdateReport, VersionSpans, WeightManifest, WeightReport
from omni_async.weights.transport.base import Parcel

_IMAGE_SHAPE = (3, 64, 64)
_STEPS = 10


def make_config(nbytes: int, samples: int) -> Config:
    """Configure a run of `samples` samples in updates of half the samples in flight.

    S = 1, so that one update is generated while the next is trained."""
    live = in_flight(nbytes)
    per_update = live // 2
    if samples % per_update:
        raise ValueError(f"a run has a multiple of {per_update} samples of {nbytes} bytes, got {samples}")
    raw = {
        "model": {"pipeline": "qwen_image", "path": "none"},
        "data": {"prompts": "none"},
        "rollout": {"group_size": GROUP, "max_inflight": CONCURRENT_PUTS, "num_inference_steps": _STEPS},
        "reward": {"batch": CONCURRENT_PUTS, "scorers": [{"name": "none"}]},
        "staleness": {"max_updates": 1},
        "buffer": {"trajectories": live, "groups": live // GROUP},
        "algorithm": {"name": "flow_grpo"},
        "trainer": {"updates": samples // per_update, "groups_per_update": per_update // GROUP},
    }
    config = with_spec(msgspec.convert(raw, Config))
    problem = check(config)
    assert problem is None, problem
    return config


class Renewable:
    """A role in an actor that can be replaced by another one."""

    def __init__(self) -> None:
        self._role: Any = None

    async def phase(self, build: Callable[[], Any]) -> None:
        self._role = build()

    def __getattr__(self, method: str) -> Any:
        return getattr(self._role, method)


class InstantEngine:
    """A `RolloutEngine` that has every sample ready."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.name = name
        self._source = Source(nbytes)
        self._media = Media(image=np.zeros(_IMAGE_SHAPE, np.uint8))
        self._version = 0

    async def start(self) -> WeightReport:
        return WeightReport(self.name, 0, "")

    async def generate(self, request: SampleRequest) -> Trajectory:
        payload: Any = self._source.payload(request.group * GROUP + request.sample)
        return Trajectory(payload, self._media, VersionSpans.same(self._version, _STEPS))

    async def stage(self, manifest: WeightManifest, buckets: list[Any]) -> str:
        return manifest.digest

    async def swap(self, version: int) -> WeightReport:
        self._version = version
        return WeightReport(self.name, version, str(version))

    async def close(self) -> None:
        """Do nothing: there is nothing to free."""


class InstantScorer(Scorer):
    """A scorer of rewards that differ, so that no group is rejected."""

    name = "instant"

    def __init__(self) -> None:
        self._given = 0

    def score(self, images: Sequence[Any], prompts: Sequence[Prompt]) -> list[Score]:
        self._given += len(images)
        return [Score(float(self._given + i)) for i in range(len(images))]


class GroupTrainer:
    """A trainer that takes groups, fetches their trajectories, and publishes a version for every update."""

    def __init__(self, nbytes: int, samples: int, coordinator: Any, producer: Any) -> None:
        self._nbytes = nbytes
        self._samples = samples
        self._plan = make_config(nbytes, samples).trainer
        self._coordinator = coordinator
        self._producer = producer
        self._store = RayStore()

    async def run(self) -> int:
        """Return the number of samples missing at the end: 0."""
        tally = Tally(self._nbytes, self._samples)
        await self._publish(0)
        for version in range(self._plan.updates):
            groups: list[int] = []
            while missing := self._plan.groups_per_update - len(groups):
                for group in await self._coordinator.next_groups(version, missing):
                    for payload in await asyncio.gather(
                        *(self._store.get(sample.trajectory) for sample in group.samples)
                    ):
                        tally.take(payload)
                    groups.append(group.group)
            await self._coordinator.update_done(UpdateReport(version + 1, tuple(groups), {}, 0.0, 1.0))
            await self._publish(version + 1)
        return tally.left

    async def _publish(self, version: int) -> None:
        await self._coordinator.announce(version, str(version))
        report = await self._producer.receive_weights(WeightManifest(version, "full", str(version), ()), Parcel(None))
        await self._coordinator.engine_holds(report)


# Roles that the actors host in one run.


def build_coordinator(nbytes: int, samples: int) -> Coordinator:
    prompts = [Prompt(i, f"prompt {i}") for i in range(64)]
    return Coordinator(make_config(nbytes, samples), "benchmark", prompts, [], lambda entry: None)


def build_producer(nbytes: int, samples: int, coordinator: Any) -> Producer:
    config = make_config(nbytes, samples)
    (name,) = config.engine_names
    return Producer(name, config, InstantEngine(name, nbytes), coordinator, RayStore(), WallClock())


def build_rewarder(nbytes: int, samples: int, coordinator: Any) -> Rewarder:
    config = make_config(nbytes, samples)
    reward = LoadedReward.of(config.reward, InstantScorer())
    return Rewarder("reward-0", config, reward, coordinator, RayStore(), WallClock())


def build_trainer(nbytes: int, samples: int, coordinator: Any, producer: Any) -> GroupTrainer:
    return GroupTrainer(nbytes, samples, coordinator, producer)
