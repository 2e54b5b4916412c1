"""Computes what the law needs of a job, and lists what the profile has not measured.

That is its stage times, with what its algorithm streams and recomputes.
"""

from __future__ import annotations

from omni_async.actors.plan import plan_updates
from omni_async.algorithms.dealing import samples_per_rank
from omni_async.config import Config
from omni_async.performance.law import StageTimes
from omni_async.performance.profile import Profile
from omni_async.performance.stages import stage_times, unmeasured, with_estimates


def times_of(config: Config, profile: Profile) -> StageTimes:
    """Return mean seconds per update, in the profile's time."""
    plan = plan_updates(config)
    return stage_times(
        config,
        with_estimates(profile, config),
        streams=plan.mode != "collect",
        recomputes_proximal=plan.proximal,
        samples_per_rank=samples_per_rank(config),
    )


def not_measured(config: Config, profile: Profile) -> list[str]:
    """Return sentences about stages that the job needs and the profile has no time for."""
    return unmeasured(profile, config, recomputes_proximal=plan_updates(config).proximal)
