"""Defines the result of a simulation, and computes the law's inputs for the same job."""

from __future__ import annotations

import msgspec

from omni_async.algorithms.kinds import samples_per_rank
from omni_async.config import Config
from omni_async.performance.law import StageTimes, stage_times, unmeasured, with_estimates
from omni_async.performance.profile import Profile
from omni_async.roles.plan import Plan, plan_updates


class Occupancy(msgspec.Struct, frozen=True):
    """How full a buffer was: its slots, and how many of them were reserved (time-weighted mean, and maximum)."""

    capacity: int
    mean: float
    largest: int


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one simulation.

    Seconds are the profile's (virtual) ones.
    - `step_s`: mean seconds between updates in the steady part of the run, without warm-up and drain.
    - `step_spread_s`: their standard deviation.
    - `busy`: role -> busy, starved, backpressured fraction of the steady part.
    - `staleness`: trained groups by staleness, over the whole run.
    - `reserve_s`, `starved_s`: means of the steady part (`omni_async.control.admission.Pace`).
    - `bundle`: samples that were simulated as one.
    - `bound_fraction` = law_s / step_s."""

    updates: int
    virtual_s: float
    wall_s: float
    step_s: float
    step_spread_s: float
    images_per_s: float
    images_per_s_per_device: float
    devices: float
    busy: dict[str, dict[str, float]]
    staleness: dict[int, int]
    staleness_mean: float
    staleness_max: int
    reserve_s: float
    starved_s: float
    buffers: dict[str, Occupancy]
    counters: dict[str, int]
    times: StageTimes
    law_s: float
    bundle: int

    @property
    def bound_fraction(self) -> float:
        return self.law_s / self.step_s if self.step_s > 0 else 0.0


class Sweep(msgspec.Struct, frozen=True):
    """The predictions of a job under every schedule and several budgets.

    - `results`: schedule or `async S=N` -> its prediction, with room in the buffers; `sync` is the first.
    - `left_out`: name -> why the recipe cannot run that way."""

    results: dict[str, Simulated]
    left_out: dict[str, str]


def times_of(config: Config, profile: Profile, plan: Plan | None = None) -> StageTimes:
    """Return mean seconds per update, in the profile's time.

    Args:
        config: The job.
        profile: As it was read, without estimates.
        plan: How updates are carried out (None: derived from `config`)."""
    plan = plan or plan_updates(config)
    return stage_times(
        config,
        with_estimates(profile, config),
        streams=plan.mode != "collect",
        recomputes_proximal=plan.proximal,
        samples_per_rank=samples_per_rank(config),
    )


def not_measured(config: Config, profile: Profile) -> list[str]:
    """Return sentences about needs of the job for which the profile has no time, or may have a wrong time."""
    calls = config.rollout.calls
    said = [f"rollout.calls: profile {profile.name}'s times for a sample are taken for its {calls} calls together"]
    return (said if calls > 1 else []) + unmeasured(profile, config, recomputes_proximal=plan_updates(config).proximal)
