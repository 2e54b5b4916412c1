"""Plans an overlap benchmark: what it runs, in which order, and what of it is complete already. Starts nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from omni_async.bench.arms import Arm, arm_config, base_config
from omni_async.bench.fingerprint import fingerprint, stamped
from omni_async.bench.measure import enough_updates, steady_part
from omni_async.config import Config, ConfigError, resolved_yaml
from omni_async.preflight.check import preflight
from omni_async.runtime.inputs import RunInputs
from omni_async.tracking.summary import read_summary


@dataclass(frozen=True)
class PlannedArm:
    """An arm with the inputs of its runs or, `skipped`, why there are none."""

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

        A round starts one arm later than the one before it, so that no arm always follows the same one. Arms of a round
        share its seed: the same prompts and the same noise."""
        runnable = [(planned.arm, planned.inputs) for planned in self.arms if planned.inputs is not None]
        for number in range(self.repeats):
            first = number % len(runnable) if runnable else 0
            for arm, inputs in runnable[first:] + runnable[:first]:
                yield Job(arm, number, self._of_round(arm, number, inputs))

    def _of_round(self, arm: Arm, number: int, inputs: RunInputs) -> RunInputs:
        folder = self.out.absolute() / "runs" / f"{arm.folder}-r{number + 1}"
        run = structs.replace(inputs.config.run, name=arm.folder, dir=str(folder), seed=self.base.run.seed + number)
        return replace(inputs, config=structs.replace(inputs.config, run=run))


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
    """Make the plan; with `steps` each arm's runs are just long enough to measure that many.

    Raises ConfigError, one line, where nothing can be measured; an arm that the recipe rules out is skipped with the
    reason."""
    if steps is not None:
        every = base_config(recipe, overrides, None).weights.publish_every
        updates = max(enough_updates(arm.max_updates, steps, every) for arm in arms)
    base = base_config(recipe, overrides, updates, fewest=max(enough_updates(arm.max_updates) for arm in arms))
    preflight(base)
    planned = [_planned(recipe, overrides, base, arm, steps) for arm in arms]
    for config in sorted((p.config for p in planned if p.config), key=lambda config: -config.staleness.max_updates):
        steady_part(config)  # the most demanding arm first
    reasons = [f"{p.arm.name}: {p.skipped}" for p in planned if p.skipped]
    if len(reasons) == len(planned):
        raise ConfigError(f"no arm can be run; {reasons[0]}")
    return Plan(recipe, out, repeats, base, tuple(planned))


def _planned(recipe: Path, overrides: Sequence[str], base: Config, arm: Arm, steps: int | None) -> PlannedArm:
    if steps is not None:
        every = base.weights.publish_every if arm.schedule == "async" else 1  # the other schedules publish every update
        base = structs.replace(
            base, trainer=structs.replace(base.trainer, updates=enough_updates(arm.max_updates, steps, every))
        )
    try:
        return PlannedArm(arm, preflight(arm_config(recipe, overrides, base, arm)))
    except ConfigError as error:
        return PlannedArm(arm, skipped=str(error).removeprefix(f"{recipe}: "))


def finished_run(inputs: RunInputs) -> Path | None:
    """Return the newest run folder in `run.dir` that is done, has a timeline and would be made the same now.

    That is by this code, with exactly this configuration, profile, prompts and model."""
    wanted, mark = resolved_yaml(inputs.config), fingerprint(inputs)
    for run in sorted(Path(inputs.config.run.dir).glob("*/"), reverse=True):
        try:
            same = (run / "config.yaml").read_text(encoding="utf-8") == wanted
            if (
                same
                and stamped(run) == mark
                and read_summary(run / "summary.json").status == "done"
                and (run / "trace.json").is_file()
            ):
                return run
        except (OSError, ValueError, RecursionError):  # cut off while it was written
            continue
    return None
