"""Calls the workers of a pool of `reward.pools` for a scorer's scores, instead of running the scorer here."""

from __future__ import annotations

from omni_async.config.reward import Reward, Scorer
from omni_async.rewards import base, registry
from omni_async.rewards.scorers.http import HttpScorer

_ATTEMPTS = 3


def scorers_of(reward: Reward, pool: str) -> list[Scorer]:
    """Return the scorers of a pool, in the order of the recipe."""
    return [scorer for scorer in reward.scorers if scorer.pool == pool]


def path_in_pool(number: int) -> str:
    """Return the path at which a worker of a pool serves its scorer of that number."""
    return f"/{number}"


def build_for(reward: Reward, config: Scorer, gpus: float) -> base.Scorer:
    """Build a scorer for a reward worker: the scorer itself, or a client of the pool that runs it."""
    if config.pool is None:
        return registry.build(config, gpus)
    number = next(i for i, one in enumerate(scorers_of(reward, config.pool)) if one is config)
    timeout_s = reward.timeout_s if config.timeout_s is None else config.timeout_s
    return HttpScorer(
        server=config.pool,
        path=path_in_pool(number),
        # After `timeout_s` the pool's own `ScorerCalls` gives a call up. A client without a reply tries another
        # worker.
        timeout_s=min(1.5 * timeout_s, 1e6),
        retries=_ATTEMPTS - 1,
        connections=10_000,
    )
