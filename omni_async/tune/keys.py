"""Handles the keys that tuning chooses, as a mapping from key path to value, and the values that are worth trying.

Pure: no clock, no randomness.

A change of one key brings along what depends on it (`moved`), so that two settings differ in what is compared and not
in a buffer that suddenly binds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from operator import attrgetter

from msgspec.structs import replace

from omni_async.config import Config
from omni_async.performance.stages import engine_batch

Value = int | str
Keys = Mapping[str, Value]

S = "staleness.max_updates"
GROUPS = "buffer.groups"
TRAJECTORIES = "buffer.trajectories"
WINDOW = "buffer.window"
PUBLISH = "weights.publish_every"
SWAP = "weights.swap"
INFLIGHT = "rollout.max_inflight"
ENGINES = "rollout.workers"
REWARDERS = "reward.workers"
RANKS = "trainer.workers"
SPLIT = (ENGINES, REWARDERS, RANKS)
TUNED = (*SPLIT, S, GROUPS, TRAJECTORIES, WINDOW, PUBLISH, SWAP, INFLIGHT)


def with_keys(config: Config, keys: Keys) -> Config:
    """Return the configuration with these keys set; its checks are not run."""
    for path, value in keys.items():
        section, key = path.split(".")
        config = replace(config, **{section: replace(getattr(config, section), **{key: value})})
    return config


def keys_of(config: Config, paths: Iterable[str]) -> dict[str, Value]:
    """Return the configuration's values of these keys."""
    return {path: attrgetter(path)(config) for path in paths}


def count(keys: Keys, path: str) -> int:
    """Return the value of a key that is a number."""
    return int(keys[path])


def roomy(config: Config, split: Keys, max_updates: int) -> dict[str, Value]:
    """Return keys under which nothing but S and the split can bind.

    Every admitted group and sample has a slot, every version is published at once."""
    groups = (max_updates + 1) * config.trainer.groups_per_update
    return {
        **split,
        S: max_updates,
        GROUPS: groups,
        TRAJECTORIES: groups * config.rollout.group_size,
        WINDOW: 1,
        PUBLISH: 1,
        SWAP: "step",
        INFLIGHT: max(config.rollout.max_inflight, config.rollout.max_batch),
    }


def fewest_trajectories(config: Config, keys: Keys) -> int:
    """Return the trajectory slots below which engines cannot fill their batches.

    What smaller batches cost is not asked: a profile that was measured at one size cannot say."""
    batch = min(config.rollout.max_batch, count(keys, INFLIGHT))
    admitted = (count(keys, S) + 1) * config.trainer.groups_per_update * config.rollout.group_size
    return min(count(keys, ENGINES) * batch, admitted)


def half_batch(config: Config, keys: Keys) -> int:
    """Return half a batch of an engine: the unit in which trajectory slots are searched."""
    return max(1, min(config.rollout.max_batch, count(keys, INFLIGHT)) // 2)


def moved(config: Config, keys: Keys, path: str, value: Value) -> dict[str, Value]:
    """Return the keys with one of them changed.

    With S, publish_every or the window, there is a slot for every group that S admits, and publish_every stays allowed;
    with the split, the trajectory slots grow with the samples that engines and reward workers hold."""
    after = {**keys, path: value}
    if value == keys[path]:
        return after
    if path == S:
        after[PUBLISH] = min(count(keys, PUBLISH), count(after, S) + 1)
    if path in (S, PUBLISH, WINDOW):
        after[GROUPS] = (count(after, S) + 1) * config.trainer.groups_per_update
    if path in SPLIT:
        unit = half_batch(config, keys)
        slots = count(keys, TRAJECTORIES) * _held(config, after) / _held(config, keys)
        after[TRAJECTORIES] = math.ceil(slots / unit) * unit
    after[TRAJECTORIES] = max(count(after, TRAJECTORIES), fewest_trajectories(config, after))
    return after


def dealt(config: Config, keys: Keys, split: Mapping[str, int]) -> dict[str, Value]:
    """Return the keys with another split."""
    after = dict(keys)
    for path, workers in split.items():
        after = moved(config, after, path, workers)
    return after


def _held(config: Config, keys: Keys) -> int:
    """Count samples in batches of engines and of reward workers."""
    batch = engine_batch(with_keys(config, {**keys, TRAJECTORIES: 2**31}))
    return count(keys, ENGINES) * batch + count(keys, REWARDERS) * config.reward.batch


def values(config: Config, keys: Keys, path: str) -> list[Value]:
    """Return the values to try of a key that has few, the most modest first; the one that is set is among them."""
    if path == SWAP:
        return ["step", "request", "drain"]
    if path == PUBLISH:
        return [k for k in (1, 2, 4) if k <= count(keys, S) + 1]
    if path == WINDOW:
        groups = config.trainer.groups_per_update
        return [1, *sorted({2, max(2, groups // 2), max(2, groups)})]
    if path == INFLIGHT:
        # Slots cost nothing by themselves: the recipe's are as good as any.
        batch, here = config.rollout.max_batch, config.rollout.max_inflight
        return [here, *sorted({batch, 2 * batch} - {here})]
    if path == REWARDERS:
        here = count(keys, path)
        return sorted({max(1, here // 2), max(1, here - 1), here, here + 1})
    raise ValueError(f"{path} has no short list of values")
