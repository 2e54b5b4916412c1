"""Predicts the effect of one change on a run: staleness, buffers, publishes, one more engine, reward worker or rank.

Present and changes are simulated with the run's own service times. The model's error is the difference between the
simulated present and the run's measured time; it is added to the variation over seeds of the service times. Pure and
deterministic computation, without waits.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise

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
# Limits of one simulation: a tenth of a second of one core, or 24 updates if those take longer.
_MOST_BUNDLES = 4_000
_FEWEST_UPDATES, _MOST_UPDATES = 24, 120
_OF_WORKER = 0.1  # a worker's time in an update, in bundles
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


class LeftOut(msgspec.Struct, frozen=True):
    """A change that cannot be made or evaluated, and why."""

    name: str
    reason: str


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. Seconds are the profile's, which are the run's own.

    - `measured_s`: the run's seconds per update, over its `measured_updates` steady ones; None if it has too few.
    - `model_error` = present.step_s / measured_s - 1.
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
    learning: str = LEARNING


def what_if(
    config: Config,
    profile: Profile,
    finished: Sequence[float] = (),
    *,
    devices: float | None = None,
    seed: int = 0,
    progress: Callable[[int, int, str], None] | None = None,
    most: float = math.inf,
) -> WhatIf:
    """Simulate the present and every change of it.

    Args:
        config: The run's resolved configuration.
        profile: The service times that the run measured.
        finished: When the updates of its newest attempt ended, in seconds (`finished` in metrics.jsonl).
        devices: Number of the run's devices (`devices` in summary.json); None: as many as the job requests.
        seed: Seed of the service times; others follow it.
        progress: Called with the number of simulated jobs, the total, and the name of the next.
        most: Most bundles of all simulations together, with workers counted as parts of some.

    Raises:
        ConfigError: Nothing is generated, the job cannot be trained, its simulations have more than `most` bundles, or
            take no time."""
    if config.data.preferences is not None:
        raise ConfigError("data.preferences: nothing is generated, so there is nothing to wait for and nothing to gain")
    require_trainable(config)
    asked = list(changes(config, profile))
    possible = [change for change in asked if change.problem is None]
    seeds = _SEEDS if any(stage.variation for stage in profile.stages().values()) else 1
    bundle, updates = _size(config)
    jobs = [config, *(change.config for change in possible)]
    if (work := seeds * sum(_enough(job, updates) * _load(job, bundle) for job in jobs)) > most:
        raise ConfigError(f"{work:.3g} samples would be simulated; `omni-async simulate` does it, in minutes or more")

    def runs(number: int, name: str, job: Config) -> list[Simulated]:
        if progress is not None:
            progress(number, len(possible) + 1, name)
        enough = _enough(job, updates)
        found = [simulate(job, profile, updates=enough, seed=seed + i, bundle=bundle) for i in range(seeds)]
        if not all(one.step_s > 0 for one in found):
            raise ConfigError(f"profile {profile.name}: an update takes no time in it, so that nothing can be gained")
        return found

    now = runs(0, "the run as it is", config)
    took, num_took = measured_step(config, finished)
    error = statistics.fmean(one.step_s for one in now) / took - 1 if took else None
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
        caveats=_caveats(config, profile, took, devices),
    )


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


def _size(config: Config) -> tuple[int, int]:
    """Return samples per bundle, and a number of updates that takes about a tenth of a second."""
    per_update = config.trainer.groups_per_update * config.rollout.group_size
    bundle = choose_bundle(config, _MOST_UPDATES, most=_MOST_BUNDLES)
    affordable = _MOST_BUNDLES * bundle // per_update
    return bundle, min(_MOST_UPDATES, max(_FEWEST_UPDATES, affordable))


def _enough(config: Config, updates: int) -> int:
    """Return the number of updates to simulate for a given number of steady ones."""
    return updates + 2 * (config.staleness.max_updates + 1)


def _load(config: Config, bundle: int) -> float:
    """Return how many bundles take as long to simulate as an update."""
    samples = config.trainer.groups_per_update * config.rollout.group_size
    return samples / bundle + (config.rollout.workers + config.reward.workers) * _OF_WORKER


def _caveats(config: Config, profile: Profile, took: float | None, devices: float | None) -> list[str]:
    said = list(not_measured(config, profile))
    if took is None:
        said.append("there is no steady part of a run to compare with, so the error of the simulation is not in +-")
    elif config.validation is not None:
        said.append("validation rounds and checkpoints are in what the run took, and not simulated")
    if devices is not None and devices < num_devices(config):
        said.append(
            f"the roles share {devices:g} CPUs and ask for {num_devices(config):g}: workers that have none of their own"
            " slow the others down, which is not simulated"
        )
    return [*said, _TAKEN]
