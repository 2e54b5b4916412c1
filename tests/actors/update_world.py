"""Runs an update to its end on ranks of the test's own, and makes groups of rewards for it."""

from __future__ import annotations

import asyncio
from typing import Any

from actor_world import AccountingRank, Desk, make_config, make_group

from omni_async.actors.plan import Plan, plan_updates
from omni_async.actors.tracer import Tracer
from omni_async.actors.update import Update
from omni_async.aio.clock import ManualClock
from omni_async.algorithms.history import RewardHistory
from omni_async.config import Config
from omni_async.types import ReadyGroup

REWARDS = [[0.1, 0.9, 0.4, 0.3], [2.0, 1.0, 1.5, 0.0], [0.2, 0.2, 0.3, 0.7], [1.0, 3.0, 2.0, 2.5]]
GROUP_STD = {"algorithm.advantage": {"std": "group"}}
FINAL_LATENTS = {"rollout.sde": None, "algorithm.clip_range": None}


def make_update(
    config: Config,
    ranks: list[Any],
    version: int = 0,
    history: RewardHistory | None = None,
    plan: Plan | None = None,
    **more: Any,
) -> Update:
    tracer = Tracer("trainer", Desk(), ManualClock())
    return Update(config, plan or plan_updates(config), ranks, tracer, version, history or RewardHistory(), **more)


def run_update(config: Config, ranks: list[Any], groups: list[ReadyGroup], **kwargs: Any) -> dict[str, float]:
    async def main() -> dict[str, float]:
        update = make_update(config, ranks, **kwargs)
        for missing, group in zip(range(len(groups), 0, -1), groups, strict=True):
            assert update.missing == missing
            await update.add(group)
        assert update.missing == 0
        return await update.finish()

    return asyncio.run(main())


def account(rewards: list[list[float]] = REWARDS, **changes: Any) -> AccountingRank:
    rank = AccountingRank()
    config = make_config(**{"trainer.groups_per_update": len(rewards), **changes})
    run_update(config, [rank], [make_group(i, values) for i, values in enumerate(rewards)])
    return rank
