"""Simulates a job in virtual time: the real coordinator, simulated roles, a profile's time in place of devices.

Checkpoints take no time here. Waits for nothing real; a deadlocked job raises DeadlockError at
once.
"""

from __future__ import annotations

import asyncio
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import cast

from msgspec import UNSET
from msgspec.structs import replace

from omni_async.config import Config
from omni_async.config.role_table import BUILT_IN, WORKING, roles_of
from omni_async.config.schedule import num_devices
from omni_async.control.admission import Pace
from omni_async.control.coordinator import Coordinator
from omni_async.performance.law import async_step, with_estimates
from omni_async.performance.profile import Profile
from omni_async.roles.plan import plan_updates
from omni_async.simulation.result import Simulated, Sweep, times_of
from omni_async.simulation.simulated_answers import SimulatedAnswers
from omni_async.simulation.simulated_engine import SimulatedEngine
from omni_async.simulation.simulated_roles import (
    SimulatedPublisher,
    SimulatedTrainer,
    reward_worker,
    watch,
)
from omni_async.simulation.sweep import arms, choose_bundle, in_bundles
from omni_async.simulation.virtual_time import VirtualTimeLoop, run
from omni_async.simulation.world import Meters, Outage, SharedDevices, World
from omni_async.types import Prompt

_UPDATES = 200
_PROMPTS = (Prompt(0, "simulated"),)


class Steady:
    """Updates whose steps count: after the first `first`, up to number `last`.

    The warm-up is excluded, until the pipeline has filled and turned over once, and so is the drain, when no more
    groups are admitted. The part between contains whole periods of publishes and waves."""

    def __init__(self, config: Config, updates: int) -> None:
        budget, every = config.staleness.max_updates, config.weights.publish_every
        self.first, last = max(2, budget + 2), updates - budget
        if last <= self.first:
            raise ValueError(
                f"updates: a simulation with a budget of {budget} updates needs at least {self.first + budget + 1}, got"
                f" {updates}"
            )
        length = last - self.first
        periods = (math.lcm(budget + 1, every), every)
        period = next((period for period in periods if period <= length), 1)
        self.last = self.first + length // period * period


def default_updates(config: Config) -> int:
    """Return the recipe's number of updates, or more if that would hardly leave a steady part."""
    return max(_UPDATES, config.trainer.updates)


def simulate(
    config: Config,
    profile: Profile,
    *,
    updates: int | None = None,
    seed: int = 0,
    bundle: int | None = None,
    outage: Outage | None = None,
    validation: int = 0,
    rejected: float = 0.0,
    progress: Callable[[int], None] | None = None,
) -> Simulated:
    """Simulate a job; checkpoints are omitted.

    Args:
        config: The job.
        profile: The service times of its devices, unscaled.
        updates: Number of updates (None: the recipe's, at least 200).
        seed: Seed of the service times.
        bundle: Samples of a group that are simulated as one (None: 1 unless that would take minutes).
        outage: A span in which no job of a stage makes progress, in the profile's seconds (None: no outage).
        validation: Samples of a validation round (0: rounds are omitted).
        rejected: Share of the groups that are rejected; a group that is simulated as one bundle never is.
        progress: Called with the number of every update.

    Raises:
        ValueError: Too few updates, or a bundle that does not divide a group.
        RuntimeError: The run failed, which would be a bug."""
    started = time.perf_counter()
    config = replace(config, rollout=config.rollout.as_one_call)
    profile = with_estimates(profile, config)
    updates = default_updates(config) if updates is None else updates
    bundle = choose_bundle(config, updates) if bundle is None else bundle
    steady = Steady(config, updates)
    ends: list[float] = []
    paces: list[Pace] = []

    async def play() -> World:
        world = _world(config, profile, updates, seed, bundle, outage, validation, rejected)

        def updated(version: int) -> None:
            ends.append(world.loop.now)
            paces.append(world.coordinator.admission.pace)
            if version == steady.first:
                world.meters.window.opened = world.loop.now
            elif version == steady.last:
                world.meters.window.closed = world.loop.now
            if progress is not None:
                progress(version)

        await _play(world, updated)
        return world

    with _rarely_collecting():
        world = run(play())
    wall_s = time.perf_counter() - started
    return _result(config, world, steady, ends, paces, wall_s)


def sweep(config: Config, profile: Profile, *, updates: int | None = None, seed: int = 0) -> Sweep:
    """Simulate a job under every schedule and several staleness budgets, with room in the buffers.

    Arguments and errors are those of `simulate`."""
    found = arms(config)
    possible = [arm for arm in found if arm.problem is None]
    return Sweep(
        {arm.name: simulate(arm.config, profile, updates=updates, seed=seed) for arm in possible},
        {arm.name: arm.problem for arm in found if arm.problem is not None},
    )


def _result(
    config: Config, world: World, steady: Steady, ends: list[float], paces: list[Pace], wall_s: float
) -> Simulated:
    """Return the result of a job that has been played.

    Args:
        config: The job, in samples; the world's is in bundles.
        world: The world after the last update.
        steady: The updates that count.
        ends: The virtual time of every update's end.
        paces: What admission measured by the end of every update.
        wall_s: The seconds that playing took."""
    steps = [after - before for before, after in pairwise(ends[steady.first - 1 : steady.last])]
    step, times, devices = statistics.fmean(steps), times_of(config, world.profile), num_devices(config)
    images = config.trainer.groups_per_update * config.rollout.group_size
    rate = images / step if step > 0 else math.inf
    ledger, meters, bundle = world.coordinator.ledger, world.meters, world.bundle
    staleness = dict(sorted(ledger.staleness.items()))
    return Simulated(
        updates=len(ends),
        virtual_s=ends[-1],
        wall_s=wall_s,
        step_s=step,
        step_spread_s=statistics.pstdev(steps),
        images_per_s=rate,
        images_per_s_per_device=rate / devices,
        devices=devices,
        busy={role: meters.fractions(role) for role in meters.busy},
        staleness=staleness,
        staleness_mean=sum(age * count for age, count in staleness.items()) / sum(staleness.values()),
        staleness_max=max(staleness),
        reserve_s=statistics.fmean(pace.reserve_s for pace in paces[steady.first : steady.last]),
        starved_s=statistics.fmean(pace.starved_s for pace in paces[steady.first : steady.last]),
        buffers={name: meters.occupancy(name, bundle if name == "trajectories" else 1) for name in meters.reserved},
        counters=ledger.counters(),
        times=times,
        law_s=async_step(times, config.staleness.max_updates),
        bundle=bundle,
    )


def _world(
    config: Config,
    profile: Profile,
    updates: int,
    seed: int,
    bundle: int,
    outage: Outage | None,
    validation: int,
    rejected: float,
) -> World:
    plan = plan_updates(config)
    config = in_bundles(config, bundle)
    rounds, validated = config.validation, tuple(Prompt(number, "") for number in range(validation // bundle))
    rejected = rejected if config.rollout.group_size > 1 else 0.0
    advantage = replace(config.algorithm.advantage, drop_zero_variance=rejected > 0)
    advantage = replace(advantage, track_prompts=advantage.track_prompts and not rejected)
    # Omit logged images: they take no virtual time.
    config = replace(
        config,
        algorithm=replace(config.algorithm, advantage=advantage),
        data=replace(config.data, shuffle=False),
        trainer=replace(config.trainer, updates=updates),
        tracking=replace(config.tracking, images_every=updates, images=1),
        validation=None if rounds is None or not validated else replace(rounds, samples_per_prompt=1, limit=None),
    )
    loop = cast(VirtualTimeLoop, asyncio.get_running_loop())
    rows = {spec.role: sum(map(spec.is_at_work, spec.workers(config))) for spec in BUILT_IN if spec.role in WORKING}
    workers = {role: number for role, number in rows.items() if number}
    capacities = {
        "slots": config.slots,
        "trajectories": config.buffer.trajectories,
        "replay": config.buffer.groups,
    }
    return World(
        config=config,
        profile=profile,
        plan=plan,
        coordinator=Coordinator(
            config, "simulated", _PROMPTS, validated, lambda entry: None, collects=plan.mode == "collect"
        ),
        loop=loop,
        meters=Meters(loop.time, workers, capacities),
        seed=seed,
        bundle=bundle,
        shared=SharedDevices(loop) if config.placement.colocated else None,
        outage=outage,
        rejected=rejected,
    )


async def _play(world: World, updated: Callable[[int], None]) -> None:
    publisher = SimulatedPublisher(world)
    tokens = world.profile.tokens
    engines = [
        SimulatedEngine(name, world, publisher.swapped)
        if tokens is UNSET
        else SimulatedAnswers(name, world, publisher.swapped, tokens)
        for name in world.config.engine_names
    ]
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch(world), name="watcher")
            tasks.create_task(publisher.run(engines), name="publisher")
            tasks.create_task(SimulatedTrainer(world, publisher, updated).run(), name="trainer")
            for engine in engines:
                tasks.create_task(engine.lease(), name=engine.name)
            for name in map(str, roles_of(world.config)["reward"].workers(world.config)):
                tasks.create_task(reward_worker(name, world), name=name)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None  # one exception is enough to end the run and to explain it


@contextmanager
def _rarely_collecting() -> Iterator[None]:
    """Make garbage collection rare.

    A simulation creates millions of small objects and hardly a cycle. Searching for cycles at the usual rate takes a
    fifth of its time."""
    usual = gc.get_threshold()
    gc.set_threshold(1_000_000, usual[1], usual[2])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
