"""Computes the concurrent calls of each scorer in a reward worker of a simulated or emulated job."""

from __future__ import annotations

import math
from typing import NamedTuple

from omni_async.config import Config
from omni_async.control.reward_formula import RewardFormula
from omni_async.performance.profile import Profile


class ScorerLanes(NamedTuple):
    """How an emulated reward worker runs a scorer: `batch` samples a call, `concurrency` calls at once (None: any).

    `alone`: the reward has no other scorer."""

    label: str
    batch: int
    concurrency: int | None
    alone: bool


def scorer_lanes(config: Config, profile: Profile) -> list[ScorerLanes]:
    """Return each scorer's lanes in a reward worker of an emulated run; empty if samples are not scored.

    A pool's workers are divided among the reward workers, rounded up."""
    if config.unscored:
        return []
    formula = RewardFormula(config.reward)
    pools = {pool.name: pool.workers for pool in config.reward.pools}
    found = []
    for label, scorer in zip(formula.labels, formula.scorers, strict=True):
        calls = profile.scorer(label).concurrency if scorer.concurrency is None else scorer.concurrency
        if calls is not None and scorer.pool is not None:
            calls = math.ceil(calls * pools[scorer.pool] / config.reward.workers)
        found.append(ScorerLanes(label, scorer.batch or config.reward.batch, calls, len(formula.scorers) == 1))
    return found
