"""Builds configurations and profiles to simulate, and a coordinator that hands out what a test offers."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, cast

from omni_async.actors.plan import plan_updates
from omni_async.config import Config, check
from omni_async.control.coordinator import Coordinator
from omni_async.control.ledger import Ledger
from omni_async.control.versions import Versions
from omni_async.performance.profile import Profile
from omni_async.performance.service import ServiceTime
from omni_async.simulation.virtual_time import VirtualTimeLoop
from omni_async.simulation.world import Meters, SharedDevices, World
from omni_async.types import Prompt, SampleRequest, SampleResult, ScoreJob, ScoreResult, SdeWindow, WeightReport
from pipelines.qwen_image.sampling import QwenImageSampling
from tests.configs import build


def make_config(**changes: Any) -> Config:
    """Builds a configuration that is allowed: `rollout__workers=2` sets rollout.workers. Buffers are large unless a
    test says otherwise."""
    config = build({"buffer": {"trajectories": 4096, "groups": 256}}, changes)
    assert check(config) is None, check(config)
    return config


def make_profile(**stages: float | tuple[float, ...]) -> Profile:
    """Builds a profile: a number is seconds per job, a pair also seconds per unit, a third its coefficient of
    variation."""
    times = {"generate": 0.0, "score": 0.0, "train": 0.0, **stages}
    made = {name: ServiceTime(*(value if isinstance(value, tuple) else (value,))) for name, value in times.items()}
    return Profile(name="made", source="a test", **made)


def request(sample: int, window: SdeWindow | None, group: int = 0) -> SampleRequest:
    spec = {"spec": QwenImageSampling(height=64, width=64), "num_inference_steps": 10, "noise_level": 0.7}
    number = {"sample_id": f"g{group}.s{sample}", "group": group, "sample": sample, "seed": sample}
    return SampleRequest(kind="train", prompt=Prompt(0, "a prompt"), sde_kind="flow", window=window, **number, **spec)


class FakeCoordinator:
    """A coordinator for simulated roles whose answers a test gives: `offer` requests or jobs, `end` the run; reports
    of the roles are kept with their time."""

    def __init__(self) -> None:
        self._requests: deque[SampleRequest] = deque()
        self._jobs: deque[ScoreJob] = deque()
        self._changed = asyncio.Event()
        self._over = False
        self.done: list[tuple[float, SampleResult]] = []
        self.held: list[tuple[float, str, int]] = []
        self.scored_at: list[tuple[float, tuple[str, ...]]] = []
        self.announced: list[tuple[float, int]] = []
        self.ledger = Ledger(lambda entry: None)
        self.versions = Versions()

    def offer(self, *items: SampleRequest | ScoreJob) -> None:
        for item in items:
            (self._requests if isinstance(item, SampleRequest) else self._jobs).append(item)  # type: ignore[arg-type]
        self._notify()

    def end(self) -> None:
        self._over = True
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def next_samples(self, engine: str, free: int, capacity: int) -> list[SampleRequest]:
        while not self._requests and not self._over:
            await self._changed.wait()
        return [self._requests.popleft() for _ in range(min(free, len(self._requests)))]

    async def samples_done(self, engine: str, results: list[SampleResult]) -> None:
        self.done += [(_now(), result) for result in results]

    async def next_to_score(self, worker: str, limit: int) -> list[ScoreJob]:
        while not self._jobs and not self._over:
            await self._changed.wait()
        return [self._jobs.popleft() for _ in range(min(limit, len(self._jobs)))]

    async def scored(self, worker: str, results: list[ScoreResult]) -> None:
        self.scored_at.append((_now(), tuple(result.sample_id for result in results)))

    async def announce(self, version: int, digest: str) -> None:
        self.announced.append((_now(), version))

    async def engine_holds(self, report: WeightReport) -> None:
        self.held.append((_now(), report.engine, report.version))


def _now() -> float:
    return round(asyncio.get_running_loop().time(), 6)


def make_world(config: Config, profile: Profile, coordinator: FakeCoordinator, seed: int = 0) -> World:
    """Builds the world of a simulation. To be called on the running loop of virtual time."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    workers = {"rollout": config.rollout.workers, "reward": config.reward.workers, "trainer": 1}
    return World(
        config=config,
        profile=profile,
        plan=plan_updates(config),
        coordinator=cast(Coordinator, coordinator),
        loop=loop,
        meters=Meters(loop.time, workers, {"slots": 8, "trajectories": 64, "replay": 8}),
        seed=seed,
        bundle=1,
        shared=SharedDevices(loop) if config.placement.colocated else None,
    )
