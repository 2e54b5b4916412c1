"""Derives the simulated configurations from a recipe: other schedules, other budgets, samples in bundles.

The samples of a bundle belong to one group, always run together. They are simulated as one if simulating each sample
would take minutes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from msgspec.structs import replace

from omni_async.config import Config, check
from omni_async.config.schedule import apply_schedule
from omni_async.config.schema import ScheduleName

BUDGETS = (0, 1, 2, 4, 8)
_BASELINES: tuple[ScheduleName, ...] = ("sync", "sync_colocated", "async_reward", "one_step_off")


class Arm(NamedTuple):
    """One schedule of a job. `problem`: why the recipe cannot run that way."""

    name: str
    config: Config
    problem: str | None


def arms(config: Config) -> list[Arm]:
    """Return every baseline, and `async` with every budget; buffers are large enough that only the budget binds."""
    found = {str(name): scheduled(config, name) for name in _BASELINES}
    found |= {f"async S={budget}": with_budget(scheduled(config, "async"), budget) for budget in BUDGETS}
    return [Arm(name, job, check(job)) for name, job in found.items()]


def with_budget(config: Config, budget: int) -> Config:
    """Set the budget, room for everything that it admits, and a publish at least as often as it requires."""
    groups = (budget + 1) * config.trainer.groups_per_update
    buffer = replace(
        config.buffer,
        groups=max(config.buffer.groups, groups),
        trajectories=max(config.buffer.trajectories, groups * config.rollout.group_size),
    )
    return replace(
        config,
        staleness=replace(config.staleness, max_updates=budget),
        buffer=buffer,
        weights=replace(config.weights, publish_every=min(config.weights.publish_every, budget + 1)),
    )


def scheduled(config: Config, name: ScheduleName) -> Config:
    """Return the same job on the same partition with another schedule."""
    return apply_schedule(replace(config, schedule=name, staleness=replace(config.staleness, exact=False)))


# About half a minute of one core.
_MOST_BUNDLES = 600_000
# Bundles in flight per engine: with fewer, some engines are idle although they would have some of the samples.
_FEWEST_PER_ENGINE = 1


def choose_bundle(config: Config, updates: int, most: int = _MOST_BUNDLES, fewest: float = _FEWEST_PER_ENGINE) -> int:
    """Return the smallest bundle that leaves at most `most` bundles to simulate, otherwise the largest possible one.

    It divides a group, and the batches of an engine and a reward worker.

    Args:
        config: the job.
        updates: number of simulated updates.
        most: bundles in all updates together.
        fewest: bundles in flight for each engine; samples one by one are always allowed."""
    rollout = config.rollout
    per_update = config.trainer.groups_per_update * rollout.group_size
    in_flight = config.slots * rollout.group_size / rollout.workers
    whole = math.gcd(rollout.group_size, rollout.max_batch, rollout.max_inflight, config.reward.batch)
    bundles = [
        bundle
        for bundle in range(1, whole + 1)
        if whole % bundle == 0 and (bundle == 1 or in_flight / bundle >= fewest)
    ]
    return next((bundle for bundle in bundles if updates * per_update / bundle <= most), bundles[-1])


def in_bundles(config: Config, bundle: int) -> Config:
    """Return the configuration in bundles instead of samples.

    Raises ValueError unless all samples that run together are a whole number of bundles: otherwise it would be another
    job."""
    rollout, reward, buffer = config.rollout, config.reward, config.buffer
    together = {key: getattr(rollout, key) for key in ("group_size", "max_batch", "max_inflight")}
    for key, samples in {**{f"rollout.{key}": n for key, n in together.items()}, "reward.batch": reward.batch}.items():
        if bundle < 1 or samples % bundle:
            raise ValueError(f"bundle: {bundle} samples do not divide {key} = {samples}")
    return replace(
        config,
        rollout=replace(rollout, **{key: samples // bundle for key, samples in together.items()}),
        reward=replace(reward, batch=reward.batch // bundle),
        buffer=replace(buffer, trajectories=max(1, buffer.trajectories // bundle)),
    )
