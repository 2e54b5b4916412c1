"""Lists the schedules and staleness budgets that a job is compared under, as configurations."""

from __future__ import annotations

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
    found = [_arm(str(name), _scheduled(config, name)) for name in _BASELINES]
    return found + [_arm(f"async S={budget}", with_budget(_scheduled(config, "async"), budget)) for budget in BUDGETS]


def synchronous(config: Config) -> Config:
    """Return the same job on the same partition, one stage after the other."""
    return _scheduled(config, "sync")


def with_budget(config: Config, budget: int) -> Config:
    """Set the budget, room for all that it admits, and a publish at least as often as it requires."""
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


def _scheduled(config: Config, name: ScheduleName) -> Config:
    return apply_schedule(replace(config, schedule=name, staleness=replace(config.staleness, exact=False)))


def _arm(name: str, config: Config) -> Arm:
    return Arm(name, config, check(config))
