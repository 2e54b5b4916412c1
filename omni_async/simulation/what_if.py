"""Predicts the effect of one change on a run: staleness, buffers, publishes, one more engine, reward worker or rank.

Present and changes are simulated with the run's own service times. The model's error is the difference between the
simulated present and the run's measured time; it is added to the variation over seeds of the service times. Pure and
deterministic computation, without waits.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import MappingProxyType

import msgspec

from omni_async.config import Config, ConfigError
from omni_async.config.schedule import num_devices
from omni_async.performance.law import async_step
from omni_async.performance.profile import Profile
from omni_async.roles.plan import require_trainable
from omni_async.simulation.changes import changes
from omni_async.simulation.result import Simulated, not_measured
from omni_async.simulation.simulate import Steady, simulate
from omni_async.simulation.sweep import choose_bundle

LEARNING = "Only time is simulated: the effect of a change on learning must be measured."

_SEEDS = 3
# Limits of one simulation: half a second of one core, or 24 updates if those take longer.
_MOST_BUNDLES = 4_000
_FEWEST_UPDATES, _MOST_UPDATES = 24, 120
_OF_WORKER = 0.1  # a worker's time in an update, in bundles
# The largest error of a simulation that needs no explanation.
_EXACT = 0.03
# A role that is busy for less of the time waits for something.
_BUSY = 0.9
_FULL = 0.95
_TAKEN = (
    "a rank is taken to train its share of a group in that share of the time, and a publish to take as long with one"
    " engine more"
)


class Prospect(msgspec.Struct, frozen=True, kw_only=True):
    """The present job, or the job after one change: means over the simulated seeds.

    - `keys`: the settings that make the change, on the command line or in the recipe; empty for the present.
    - `gain`: images per second relative to the present's, minus 1.
    - `uncertainty`: the half-width of `gain`, as a fraction; it also holds for `step_s`.
    - `bottleneck`: the role that is busy nearly all the time, or the key that bounds it.
    - `devices`: additional devices (accelerators; CPUs if the job uses none).
    - `gain_per_device`: None without additional devices."""

    name: str
    keys: dict[str, int | str]
    step_s: float
    images_per_s: float
    gain: float
    uncertainty: float
    bottleneck: str
    busy: dict[str, float]
    staleness_mean: float
    devices: float
    gain_per_device: float | None

    @property
    def is_clear(self) -> bool:
        """Return whether the gain, or the loss, is larger than its uncertainty."""
        return abs(self.gain) > self.uncertainty


class StageSeconds(msgspec.Struct, frozen=True):
    """Seconds per update that a worker of a stage was busy, in the run and in the simulation of it.

    `training`, `checkpoints` and `waits`, the rest, are the trainer's, and sum to an update."""

    stage: str
    measured_s: float
    simulated_s: float


class LeftOut(msgspec.Struct, frozen=True):
    """A change that cannot be made or evaluated, and why."""

    name: str
    reason: str


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. Seconds are the profile's, which are the run's own.

    - `measured_s`: the run's seconds per update, over its `measured_updates` steady ones; None if it has too few.
    - `model_error` = present.step_s / measured_s - 1.
    - `stages`: of the run and of the present; empty without a timeline.
    - `difference`: why the simulated present differs from the run; empty if it does not.
    - `seeds`, `updates`: simulated for each job.
    - `caveats`: facts about this job that the simulation does not model."""

    profile: str
    present: Prospect
    measured_s: float | None
    measured_updates: int
    model_error: float | None
    changes: list[Prospect]
    left_out: list[LeftOut]
    seeds: int
    updates: int
    caveats: list[str]
    stages: list[StageSeconds] = []
    difference: str = ""
    learning: str = LEARNING


def what_if(
    config: Config,
    profile: Profile,
    finished: Sequence[float] = (),
    *,
    devices: float | None = None,
    stages: Mapping[str, float] = MappingProxyType({}),
    validation: int = 0,
    rejected: float = 0.0,
    seed: int = 0,
    progress: Callable[[int, int, str], None] | None = None,
    most: float = math.inf,
    each: int = _MOST_BUNDLES,
) -> WhatIf:
    """Simulate the present and every change of it.

    Args:
        config: The run's resolved configuration.
        profile: The service times that the run measured.
        finished: When the updates of its newest attempt ended, in seconds (`finished` in metrics.jsonl).
        devices: Number of the run's devices (`devices` in summary.json); None: as many as the job requests.
        stages: The run's seconds per update by stage (`omni_async.simulation.run_folder.stage_seconds`).
        validation: Samples of a validation round of the run; 0: rounds are not simulated.
        rejected: Share of the run's groups that were rejected.
        seed: Seed of the service times; others follow it.
        progress: Called with the number of simulated jobs, the total, and the name of the next.
        most: Most bundles of all simulations together, with workers counted as parts of some.
        each: Bundles of one simulation: fewer take less time, and the results vary more.

    Raises:
        ConfigError: Nothing is generated, the job cannot be trained, its simulations have more than `most` bundles, or
            take no time."""
    if config.data.preferences is not None:
        raise ConfigError("data.preferences: nothing is generated, so there is nothing to wait for and nothing to gain")
    require_trainable(config)
    asked = list(changes(config, profile))
    possible = [change for change in asked if change.problem is None]
    seeds = _SEEDS if any(stage.variation for stage in profile.stages().values()) else 1
    bundle, updates = _size(config, each)
    jobs = [config, *(change.config for change in possible)]
    work = seeds * sum(_enough(job, updates) * _load(job, bundle, validation, rejected) for job in jobs)
    if work > most:
        raise ConfigError(f"{work:.3g} samples would be simulated; `omni-async simulate` does it, in minutes or more")

    def runs(number: int, name: str, job: Config) -> list[Simulated]:
        if progress is not None:
            progress(number, len(possible) + 1, name)
        enough = _enough(job, updates)
        played = partial(simulate, updates=enough, bundle=bundle, validation=validation, rejected=rejected)
        found = [played(job, profile, seed=seed + i) for i in range(seeds)]
        if not all(one.step_s > 0 for one in found):
            raise ConfigError(f"profile {profile.name}: an update takes no time in it, so that nothing can be gained")
        return found

    now = runs(0, "the run as it is", config)
    took, num_took = measured_step(config, finished)
    error = statistics.fmean(one.step_s for one in now) / took - 1 if took else None
    compared = _compared(stages, now)
    return WhatIf(
        profile=profile.name,
        present=_prospect("as it is", {}, config, now, now, config, error),
        measured_s=took,
        measured_updates=num_took,
        model_error=error,
        changes=[
            _prospect(change.name, dict(change.keys), change.config, found, now, config, error)
            for number, change in enumerate(possible, 1)
            for found in [runs(number, change.name, change.config)]
        ],
        left_out=[LeftOut(change.name, change.problem) for change in asked if change.problem is not None],
        seeds=seeds,
        updates=updates,
        caveats=_caveats(config, profile, took, devices, validation),
        stages=compared,
        difference=_difference(compared, error),
    )


def _compared(measured: Mapping[str, float], found: Sequence[Simulated]) -> list[StageSeconds]:
    """Compare the seconds of each stage of a run with those of its simulations; empty without a run's."""
    if not measured:
        return []
    busy = {role: statistics.fmean(one.busy[role]["busy"] * one.step_s for one in found) for role in found[0].busy}
    named = {"rollout": "generation", "reward": "scoring", "trainer": "training"}
    simulated = {named[role]: seconds for role, seconds in busy.items()}
    simulated["waits"] = max(0.0, statistics.fmean(one.step_s for one in found) - busy["trainer"])
    return [StageSeconds(stage, seconds, simulated.get(stage, 0.0)) for stage, seconds in measured.items()]


def _difference(stages: Sequence[StageSeconds], error: float | None) -> str:
    """Return the stage that explains most of the difference between a run and its simulation."""
    if error is None or abs(error) <= _EXACT:
        return ""
    said = f"the simulated update is {abs(error):.1%} {'longer' if error > 0 else 'shorter'} than the run's"
    if not stages:
        return f"{said}; the run has no timeline to compare its stages with"
    sign = 1 if error > 0 else -1
    largest = max(stages, key=lambda one: (one.stage != "waits", sign * (one.simulated_s - one.measured_s)))
    seconds = f"{largest.simulated_s:.3g} s simulated, {largest.measured_s:.3g} s measured"
    waits = next(one for one in stages if one.stage == "waits")
    if sign * (largest.simulated_s - largest.measured_s) < abs(waits.simulated_s - waits.measured_s) / 2:
        seconds = f"{waits.simulated_s:.3g} s simulated, {waits.measured_s:.3g} s measured"
        return f"{said}: no stage takes that much longer, the trainer's waits do: {seconds}"
    return f"{said}: {largest.stage} differs most: {seconds}"


def measured_step(config: Config, finished: Sequence[float]) -> tuple[float | None, int]:
    """Return the mean seconds between a run's updates in its steady part, and the number of these steps.

    None if it has no steady part: warm-up and drain, about S + 2 and S updates, are excluded."""
    try:
        steady = Steady(config, len(finished))
    except ValueError:
        return None, 0
    steps = [after - before for before, after in pairwise(finished[steady.first - 1 : steady.last])]
    return (statistics.fmean(steps), len(steps)) if sum(steps) > 0 else (None, 0)


def bottleneck(config: Config, found: Simulated) -> str:
    """Return the limiting factor of a simulated job: a role, or the key that bounds the work in flight."""
    role = max(found.busy, key=lambda name: found.busy[name]["busy"])
    if found.busy[role]["busy"] >= _BUSY:
        return role
    budget = config.staleness.max_updates
    if async_step(found.times, budget) > found.times.bottleneck[1] * (1 + 1e-9):
        return "staleness.max_updates"
    for buffer, key in (("trajectories", "buffer.trajectories"), ("replay", "buffer.groups")):
        if found.buffers[buffer].mean > _FULL * found.buffers[buffer].capacity:
            return key
    return role


def _prospect(
    name: str,
    keys: dict[str, int | str],
    config: Config,
    found: Sequence[Simulated],
    now: Sequence[Simulated],
    present: Config,
    error: float | None,
) -> Prospect:
    """Compare simulations of one job with the present's, seed by seed."""
    step = statistics.fmean(one.step_s for one in found)
    gain = statistics.fmean(one.step_s for one in now) / step - 1
    each = [before.step_s / after.step_s - 1 for before, after in zip(now, found, strict=True)]
    steps = [one.step_s for one in found]
    spread = max((max(each) - min(each)) / 2, (max(steps) - min(steps)) / 2 / step)
    more = num_devices(config) - num_devices(present)
    return Prospect(
        name=name,
        keys=keys,
        step_s=step,
        images_per_s=config.trainer.groups_per_update * config.rollout.group_size / step,
        gain=gain,
        uncertainty=spread + abs(error or 0.0),
        bottleneck=bottleneck(config, found[0]),
        busy={role: statistics.fmean(one.busy[role]["busy"] for one in found) for role in found[0].busy},
        staleness_mean=statistics.fmean(one.staleness_mean for one in found),
        devices=more,
        gain_per_device=gain / more if more > 0 else None,
    )


def _size(config: Config, each: int) -> tuple[int, int]:
    """Return samples per bundle, and a number of updates that have about `each` bundles."""
    per_update = config.trainer.groups_per_update * config.rollout.group_size
    bundle = choose_bundle(config, _MOST_UPDATES, most=_MOST_BUNDLES)
    affordable = each * bundle // per_update
    return bundle, min(_MOST_UPDATES, max(_FEWEST_UPDATES, affordable))


def _enough(config: Config, updates: int) -> int:
    """Return the number of updates to simulate for a given number of steady ones."""
    return updates + 2 * (config.staleness.max_updates + 1)


def _load(config: Config, bundle: int, validation: int, rejected: float) -> float:
    """Return how many bundles take as long to simulate as an update."""
    samples = config.trainer.groups_per_update * config.rollout.group_size / (1 - rejected)
    samples += validation / config.validation.every if config.validation is not None else 0
    return samples / bundle + (config.rollout.workers + config.reward.workers) * _OF_WORKER


def _caveats(config: Config, profile: Profile, took: float | None, devices: float | None, validation: int) -> list[str]:
    said = list(not_measured(config, profile))
    if took is None:
        said.append("there is no steady part of a run to compare with, so the error of the simulation is not in +-")
    elif config.validation is not None and not validation:
        said.append("validation rounds and checkpoints are in what the run took, and not simulated")
    else:
        said.append("checkpoints are in what the run took, and not simulated")
    if devices is not None and devices < num_devices(config):
        said.append(
            f"the roles share {devices:g} CPUs and ask for {num_devices(config):g}: workers that share a CPU slow each"
            " other down, which is not simulated"
        )
    return [*said, _TAKEN]
