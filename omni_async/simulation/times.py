"""What the law needs to know of a job: its stage times, with what its algorithm streams and recomputes."""

from __future__ import annotations

from omni_async.actors.plan import plan_updates
from omni_async.config import Config
from omni_async.performance.law import StageTimes
from omni_async.performance.profile import Profile
from omni_async.performance.stages import stage_times


def times_of(config: Config, profile: Profile) -> StageTimes:
    """Mean seconds per update, in the profile's time."""
    plan = plan_updates(config)
    return stage_times(config, profile, streams=plan.mode != "collect", assesses=plan.assess)
