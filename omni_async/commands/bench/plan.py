"""Plans an overlap benchmark: its arms, its runs and their order, and which runs are already complete.

An arm is a named schedule, `async` once for each staleness budget: the same runtime with other keys. Starts nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import get_args

import msgspec
from msgspec import structs

import omni_async
from omni_async.algorithms.kinds import find_kind
from omni_async.algorithms.registry import find_objective
from omni_async.commands.bench.measure import enough_updates, steady_part
from omni_async.config import Config, ConfigError, load, resolved_yaml
from omni_async.config.reading import read_file
from omni_async.config.schedule import SCHEDULES
from omni_async.config.schema import ScheduleName
from omni_async.config.writing import write_atomic
from omni_async.records.write.summary import read_summary
from omni_async.roles.inputs import RunInputs
from omni_async.runtime.preflight.check import preflight

BASELINES: tuple[ScheduleName, ...] = ("sync", "sync_colocated", "async_reward", "one_step_off")
DEFAULT_ARMS = (*BASELINES, "async:0", "async:1", "async:2", "async:4", "async:8")
_EXPECTED = f"expected {', '.join(BASELINES)} or async:S with a staleness budget S >= 0, such as async:2"
_LARGEST_BUDGET = 1000

# Applied before the user's overrides, which may change them. They leave only the job itself to take time, and remove
# settings that an arm cannot keep.
_LEAN = (
    "tracking.mlflow.enabled=false",
    "validation=null",
    "checkpoint.keep=1",
    "checkpoint.keep_best=0",
    "checkpoint.resume=null",
    "staleness.exact=false",
)
# Keys that an arm or an option sets.
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
_LARGEST = 2**20  # bytes
_FINGERPRINT = "fingerprint"


@dataclass(frozen=True)
class Arm:
    schedule: ScheduleName
    max_updates: int

    @property
    def name(self) -> str:
        return f"async:{self.max_updates}" if self.schedule == "async" else self.schedule

    @property
    def folder(self) -> str:
        """The name in a form that is valid for file systems and run names."""
        return self.name.replace(":", "-")


@dataclass(frozen=True)
class PlannedArm:
    """An arm with the inputs of its runs, or with `skipped`, the reason why it has no runs."""

    arm: Arm
    inputs: RunInputs | None = None
    skipped: str | None = None

    @property
    def config(self) -> Config | None:
        return self.inputs.config if self.inputs is not None else None


@dataclass(frozen=True)
class Job:
    arm: Arm
    round: int
    inputs: RunInputs

    @property
    def config(self) -> Config:
        return self.inputs.config


@dataclass(frozen=True)
class Plan:
    recipe: Path
    out: Path
    repeats: int
    base: Config
    arms: tuple[PlannedArm, ...]

    def jobs(self) -> Iterator[Job]:
        """Yield jobs round by round, every arm once in each.

        A round starts one arm later than the previous round, so that no arm always follows the same one. Arms of a
        round share its seed: the same prompts and the same noise."""
        runnable = [(planned.arm, planned.inputs) for planned in self.arms if planned.inputs is not None]
        for number in range(self.repeats):
            first = number % len(runnable) if runnable else 0
            for arm, inputs in runnable[first:] + runnable[:first]:
                folder = self.out.absolute() / "runs" / f"{arm.folder}-r{number + 1}"
                seed = self.base.run.seed + number
                run = structs.replace(inputs.config.run, name=arm.folder, dir=str(folder), seed=seed)
                yield Job(arm, number, replace(inputs, config=structs.replace(inputs.config, run=run)))


def parse_arms(names: Sequence[str]) -> tuple[Arm, ...]:
    """Return each arm once, in the order given. Raises ConfigError that names the first invalid arm."""
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


def make_plan(
    recipe: Path,
    overrides: Sequence[str],
    arms: Sequence[Arm],
    *,
    out: Path,
    repeats: int,
    updates: int | None,
    steps: int | None = None,
) -> Plan:
    """Plan the benchmark; an arm that the recipe rules out is skipped with the reason.

    Args:
        recipe, overrides, out, repeats, updates, steps: as `run_overlap` takes them.
        arms: as `parse_arms` returned them.

    Raises:
        ConfigError: nothing can be measured; one line."""
    if steps is not None:
        every = _base_config(recipe, overrides, None).weights.publish_every
        updates = max(enough_updates(arm.max_updates, steps, every) for arm in arms)
    base = _base_config(recipe, overrides, updates, fewest=max(enough_updates(arm.max_updates) for arm in arms))
    preflight(base)
    planned = [_planned(recipe, overrides, base, arm, steps) for arm in arms]
    for config in sorted((p.config for p in planned if p.config), key=lambda config: -config.staleness.max_updates):
        steady_part(config)  # the most demanding arm first
    reasons = [f"{p.arm.name}: {p.skipped}" for p in planned if p.skipped]
    if len(reasons) == len(planned):
        raise ConfigError(f"no arm can be run; {reasons[0]}")
    return Plan(recipe, out, repeats, base, tuple(planned))


def _base_config(recipe: Path, overrides: Sequence[str], updates: int | None, fewest: int = 1) -> Config:
    """Load the recipe with all arms' common overrides; without `updates`, raise its updates to at least `fewest`.

    Raises ConfigError if the recipe cannot be benchmarked, or if an override sets a key that belongs to the arms."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        for owned, instead in _OWNED.items():
            if f"{key}.".startswith(f"{owned}.") or owned.startswith(f"{key}."):
                raise ConfigError(f"override {override!r}: {owned} belongs to the benchmark: {instead}")
    base = load(recipe, [*_LEAN, *overrides, *([f"trainer.updates={updates}"] if updates is not None else [])])
    if updates is None and base.trainer.updates < fewest:
        base = _with_updates(base, fewest)
    if base.data.preferences is not None:
        raise ConfigError(
            f"{recipe}: data.preferences: an offline job generates nothing, so there is nothing to overlap"
        )
    return base


def _planned(recipe: Path, overrides: Sequence[str], base: Config, arm: Arm, steps: int | None) -> PlannedArm:
    if steps is not None:
        every = base.weights.publish_every if arm.schedule == "async" else 1  # the other schedules publish every update
        base = _with_updates(base, enough_updates(arm.max_updates, steps, every))
    try:
        return PlannedArm(arm, preflight(_arm_config(recipe, overrides, base, arm)))
    except ConfigError as error:
        return PlannedArm(arm, skipped=str(error).removeprefix(f"{recipe}: "))


def _with_updates(config: Config, updates: int) -> Config:
    return structs.replace(config, trainer=structs.replace(config.trainer, updates=updates))


def _arm_config(recipe: Path, overrides: Sequence[str], base: Config, arm: Arm) -> Config:
    """Return the arm's configuration, its buffers large enough that it never waits for them.

    If the recipe leaves the correction to measurements (`auto`), every arm uses the one that a run starts with: arms
    must do the same work. Raises ConfigError if the recipe rules the arm out."""
    updates = base.trainer.updates
    groups = (arm.max_updates + 1) * base.trainer.groups_per_update
    has_ratio = find_kind(find_objective(base.algorithm.name).kind).ratio  # without a ratio, nothing needs correction
    correction = json.dumps(msgspec.to_builtins(base.correction))
    return load(
        recipe,
        [
            *_LEAN,
            f"checkpoint.every={updates}",
            f"tracking.images_every={updates}",
            *overrides,
            *([f"algorithm.correction={correction}"] if has_ratio else []),
            f"trainer.updates={updates}",
            f"schedule={arm.schedule}",
            *([f"staleness.max_updates={arm.max_updates}"] if arm.schedule == "async" else []),
            f"buffer.groups={max(base.buffer.groups, groups)}",
            f"buffer.trajectories={max(base.buffer.trajectories, groups * base.rollout.group_size)}",
        ],
    )


def finished_run(inputs: RunInputs) -> Path | None:
    """Return the newest run folder in `run.dir` that is done, has a timeline and is still current, or None.

    A current run used this code, and exactly this configuration, profile, prompts and model."""
    wanted, mark = resolved_yaml(inputs.config), _fingerprint(inputs)
    for run in sorted(Path(inputs.config.run.dir).glob("*/"), reverse=True):
        try:
            if (
                read_file(run / "config.yaml", _LARGEST, within=run).decode() == wanted
                and read_file(run / _FINGERPRINT, _LARGEST, within=run).decode("ascii") == mark
                and read_summary(run / "summary.json").status == "done"
                and (run / "trace.json").is_file()
            ):
                return run
        except (OSError, ValueError, RecursionError):  # interrupted while it was written
            continue
    return None


def stamp(run: Path, inputs: RunInputs) -> None:
    """Write into a new run's folder a fingerprint of its inputs in addition to its configuration."""
    write_atomic(run / _FINGERPRINT, _fingerprint(inputs).encode())


def _fingerprint(inputs: RunInputs) -> str:
    """Return a hexadecimal digest of the code and of the content of the files that the configuration names."""
    found = hashlib.sha256(_code().encode())
    for part in (inputs.profile, inputs.prompts, inputs.validation_prompts, dict(inputs.contents)):
        found.update(msgspec.json.encode(part) + b"\n")
    return found.hexdigest()


@cache
def _code() -> str:
    root = Path(omni_async.__file__).parent
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return found.hexdigest()
