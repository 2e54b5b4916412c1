"""Lots: samples of a group that always run together and are simulated as one, where simulating each would take
minutes."""

from __future__ import annotations

import math

from msgspec.structs import replace

from omni_async.config import Config

# About half a minute of one core.
_MOST_LOTS = 600_000
# Lots in flight per engine: with fewer some engines stand idle that would have some of the samples.
_FEWEST_PER_ENGINE = 1


def choose_lot(config: Config, updates: int) -> int:
    """1 if that is fast enough. Otherwise the smallest lot that is, but none that leaves an engine too few, and only
    such as divide a group and what an engine computes or a reward worker scores together."""
    per_update = config.trainer.groups_per_update * config.rollout.group_size
    in_flight = (config.staleness.max_updates + 1) * per_update / config.rollout.workers
    whole = math.gcd(
        config.rollout.group_size, config.rollout.max_batch, config.rollout.max_inflight, config.reward.batch
    )
    lots = [
        lot for lot in range(1, whole + 1) if whole % lot == 0 and (lot == 1 or in_flight / lot >= _FEWEST_PER_ENGINE)
    ]
    return next((lot for lot in lots if updates * per_update / lot <= _MOST_LOTS), lots[-1])


def in_lots(config: Config, lot: int) -> Config:
    """The configuration that counts lots where the recipe counts samples. ValueError unless whatever runs together is a
    whole number of lots: anything else would be another job."""
    rollout, reward, buffer = config.rollout, config.reward, config.buffer
    together = {
        "rollout.group_size": rollout.group_size,
        "rollout.max_batch": rollout.max_batch,
        "rollout.max_inflight": rollout.max_inflight,
        "reward.batch": reward.batch,
    }
    for key, samples in together.items():
        if lot < 1 or samples % lot:
            raise ValueError(f"lot: {lot} samples do not divide {key} = {samples}")
    return replace(
        config,
        rollout=replace(
            rollout,
            group_size=rollout.group_size // lot,
            max_batch=rollout.max_batch // lot,
            max_inflight=rollout.max_inflight // lot,
        ),
        reward=replace(reward, batch=reward.batch // lot),
        buffer=replace(buffer, trajectories=max(1, buffer.trajectories // lot)),
    )
