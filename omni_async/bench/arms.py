"""Defines the arms of an overlap benchmark: the named schedules, `async` once for each staleness budget.

The same runtime with other keys.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import msgspec
from msgspec.structs import replace

from omni_async.algorithms.kinds import find_kind
from omni_async.algorithms.registry import find_objective
from omni_async.config import Config, ConfigError, load
from omni_async.config.schedule import SCHEDULES
from omni_async.config.schema import ScheduleName

BASELINES: tuple[ScheduleName, ...] = ("sync", "sync_colocated", "async_reward", "one_step_off")
DEFAULT_ARMS = (*BASELINES, "async:0", "async:1", "async:2", "async:4", "async:8")
_EXPECTED = f"expected {', '.join(BASELINES)} or async:S with a staleness budget S >= 0, such as async:2"
_LARGEST_BUDGET = 1000

# Given before the user's overrides, which may change them: nothing but the job itself takes time.
_LEAN = ("tracking.mlflow.enabled=false", "validation=null", "checkpoint.keep=1")
# What an arm or an option decides.
_OWNED = {
    "schedule": "use --arms",
    "staleness.max_updates": "use --arms async:S",
    "reward.streaming": "every schedule decides it; use --arms",
    "trainer.streaming": "every schedule decides it; use --arms",
    "placement.colocated": "use --arms sync_colocated",
    "trainer.updates": "use --updates",
    "run.name": "it is the arm's name",
    "run.dir": "use --out",
    "checkpoint.resume": "every run starts from the recipe's model",
    "staleness.exact": "an arm has a budget, not an age",
}
# What a recipe may say and no arm may keep.
_RESET = ("checkpoint.resume=null", "staleness.exact=false")


@dataclass(frozen=True)
class Arm:
    schedule: ScheduleName
    max_updates: int

    @property
    def name(self) -> str:
        return f"async:{self.max_updates}" if self.schedule == "async" else self.schedule

    @property
    def folder(self) -> str:
        """The name in a form that file systems and run names take."""
        return self.name.replace(":", "-")


def parse_arms(names: Sequence[str]) -> tuple[Arm, ...]:
    """Return each arm once, in the order given. Raises ConfigError that names the one that is no arm."""
    arms = dict.fromkeys(_parse(name.strip()) for name in names)
    if not arms:
        raise ConfigError(f"--arms: no arm given; {_EXPECTED}")
    return tuple(arms)


def _parse(name: str) -> Arm:
    schedule, _, budget = name.partition(":")
    if schedule == "async" and budget.isdecimal() and int(budget) <= _LARGEST_BUDGET:
        return Arm("async", int(budget))
    for known in get_args(ScheduleName):
        if name == known != "async":
            return Arm(known, SCHEDULES[known]["staleness.max_updates"])
    raise ConfigError(f"--arms: {name!r} is no arm; {_EXPECTED}")


def base_config(recipe: Path, overrides: Sequence[str], updates: int | None, fewest: int = 1) -> Config:
    """Load the recipe with what all arms share; without `updates`, at least `fewest` of them.

    Raises ConfigError where it cannot be benchmarked, or an override is an arm's to decide."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        for owned, instead in _OWNED.items():
            if f"{key}.".startswith(f"{owned}.") or owned.startswith(f"{key}."):
                raise ConfigError(f"override {override!r}: {owned} belongs to the benchmark: {instead}")
    base = load(recipe, [*_LEAN, *_RESET, *overrides, *([f"trainer.updates={updates}"] if updates is not None else [])])
    if updates is None and base.trainer.updates < fewest:
        base = replace(base, trainer=replace(base.trainer, updates=fewest))
    if base.data.preferences is not None:
        raise ConfigError(
            f"{recipe}: data.preferences: an offline job generates nothing, so there is nothing to overlap"
        )
    return base


def arm_config(recipe: Path, overrides: Sequence[str], base: Config, arm: Arm) -> Config:
    """Return the arm's configuration, its buffers large enough that it never waits for them.

    Raises ConfigError where the recipe rules the arm out.

    A correction that the recipe leaves to its staleness budget (`auto`) is the recipe's own in every arm: arms must do
    the same work."""
    updates = base.trainer.updates
    groups = (arm.max_updates + 1) * base.trainer.groups_per_update
    samples = groups * base.rollout.group_size
    return load(
        recipe,
        [
            *_LEAN,
            *_RESET,
            f"checkpoint.every={updates}",
            f"tracking.images_every={updates}",
            *overrides,
            *_correction(base),
            f"trainer.updates={updates}",
            f"schedule={arm.schedule}",
            *([f"staleness.max_updates={arm.max_updates}"] if arm.schedule == "async" else []),
            f"buffer.groups={max(base.buffer.groups, groups)}",
            f"buffer.trajectories={max(base.buffer.trajectories, samples)}",
        ],
    )


def _correction(base: Config) -> list[str]:
    if not find_kind(find_objective(base.algorithm.name).kind).ratio:
        return []  # nothing to correct
    return [f"algorithm.correction={json.dumps(msgspec.to_builtins(base.correction))}"]
