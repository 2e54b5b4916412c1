"""Groups samples into bundles, where simulating each sample would take minutes.

The samples of a bundle are of one group, always run together and are simulated as one.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from omni_async.config import Config

# About half a minute of one core.
_MOST_BUNDLES = 600_000
# Bundles in flight per engine: with fewer, some engines are idle that would have some of the samples.
_FEWEST_PER_ENGINE = 1


def choose_bundle(config: Config, updates: int, most: int = _MOST_BUNDLES, fewest: float = _FEWEST_PER_ENGINE) -> int:
    """Return the smallest bundle that leaves at most `most` of them to simulate, and else the largest there can be.

    It divides a group and what an engine computes or a reward worker scores together, and leaves every engine `fewest`.
    """
    rollout = config.rollout
    per_update = config.trainer.groups_per_update * rollout.group_size
    in_flight = (config.staleness.max_updates + 1) * per_update / rollout.workers
    whole = math.gcd(rollout.group_size, rollout.max_batch, rollout.max_inflight, config.reward.batch)
    bundles = [
        bundle
        for bundle in range(1, whole + 1)
        if whole % bundle == 0 and (bundle == 1 or in_flight / bundle >= fewest)
    ]
    return next((bundle for bundle in bundles if updates * per_update / bundle <= most), bundles[-1])


def in_bundles(config: Config, bundle: int) -> Config:
    """Return the configuration that counts bundles where the recipe counts samples.

    Raises ValueError unless all samples that run together are a whole number of bundles: anything else would be another
    job."""
    rollout, reward, buffer = config.rollout, config.reward, config.buffer
    together = {
        "rollout.group_size": rollout.group_size,
        "rollout.max_batch": rollout.max_batch,
        "rollout.max_inflight": rollout.max_inflight,
        "reward.batch": reward.batch,
    }
    for key, samples in together.items():
        if bundle < 1 or samples % bundle:
            raise ValueError(f"bundle: {bundle} samples do not divide {key} = {samples}")
    return replace(
        config,
        rollout=replace(
            rollout,
            group_size=rollout.group_size // bundle,
            max_batch=rollout.max_batch // bundle,
            max_inflight=rollout.max_inflight // bundle,
        ),
        reward=replace(reward, batch=reward.batch // bundle),
        buffer=replace(buffer, trajectories=max(1, buffer.trajectories // bundle)),
    )
