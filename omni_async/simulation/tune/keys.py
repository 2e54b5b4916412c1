"""Handles the tuned keys, as a mapping from key path to value, values worth trying, and splits of devices.

A change of one key also changes its dependent keys (`moved`), so two settings differ only in the compared key, not in a
buffer that suddenly binds.

- Devices are accelerators if the recipe places any role on them, else CPUs. `placement.<role>` sets the devices of a
  worker.
- A role whose workers take no devices keeps the recipe's number of workers. For reward workers, the number is chosen
  so that scoring stays well below the bottleneck.
- CPUs are shared if there are fewer than one worker of each role takes; then there is nothing to split. Accelerators
  are not shared.
- The law ranks the splits; only splits close to the best need to be simulated.

Pure: no clock, no randomness.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Literal

import msgspec
from msgspec.structs import replace

from omni_async.algorithms.kinds import samples_per_rank
from omni_async.config import Config, ConfigError
from omni_async.config.checks import check
from omni_async.config.layout import layout_problems
from omni_async.performance.law import StageTimes, engine_batch, pool_time
from omni_async.performance.profile import Profile
from omni_async.roles.plan import plan_updates
from omni_async.simulation.result import times_of

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
    """Return the value of a numeric key."""
    return int(keys[path])


def roomy(config: Config, split: Keys, max_updates: int) -> dict[str, Value]:
    """Return keys with no bound except S and the split.

    Every admitted group and sample has a slot, every version is published at once.

    Args:
        config: the job, which determines the sizes of groups, updates and batches.
        split: workers of each role.
        max_updates: the budget S."""
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
    """Return the number of trajectory slots that engines need to fill their batches.

    The cost of smaller batches is not considered: a profile measured at one size does not contain it."""
    batch = min(config.rollout.max_batch, count(keys, INFLIGHT))
    admitted = (count(keys, S) + 1) * config.trainer.groups_per_update * config.rollout.group_size
    return min(count(keys, ENGINES) * batch, admitted)


def half_batch(config: Config, keys: Keys) -> int:
    """Return half a batch of an engine: the step of the search for trajectory slots."""
    return max(1, min(config.rollout.max_batch, count(keys, INFLIGHT)) // 2)


def moved(config: Config, keys: Keys, path: str, value: Value) -> dict[str, Value]:
    """Return the keys with one of them changed.

    With S, publish_every or the window, there is a slot for every group that S admits, and publish_every stays allowed;
    with the split, the trajectory slots grow with the samples that engines and reward workers hold.

    Args:
        config: the job.
        keys: all tuned keys, before the change.
        path: the key to change.
        value: its new value."""
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
    """Return the keys with another split, and its dependent keys as in `moved`.

    Args:
        config: the job.
        keys: all tuned keys, with the former split.
        split: workers by key."""
    after = dict(keys)
    for path, workers in split.items():
        after = moved(config, after, path, workers)
    return after


def _held(config: Config, keys: Keys) -> int:
    """Count samples in batches of engines and of reward workers."""
    batch = engine_batch(with_keys(config, {**keys, TRAJECTORIES: 2**31}))
    scoring = 0 if config.unscored else count(keys, REWARDERS) * config.reward.batch
    return count(keys, ENGINES) * batch + scoring


def values(config: Config, keys: Keys, path: str) -> list[Value]:
    """Return the values to try of a key that has few, the most modest first.

    Args:
        config: the recipe, whose `max_inflight` counts as the most modest.
        keys: all tuned keys and their values.
        path: the key.

    Raises:
        ValueError: the key has no short list of values."""
    if path == SWAP:
        return ["step", "request", "drain"]
    if path == PUBLISH:
        intervals = sorted({1, 2, 4, config.weights.publish_every})  # the recipe's own is included for comparison
        return [k for k in intervals if k <= count(keys, S) + 1]
    if path == WINDOW:
        groups = config.trainer.groups_per_update
        return [1, *sorted({2, max(2, groups // 2), max(2, groups)})]
    if path == INFLIGHT:
        # Slots alone cost nothing: the recipe's are as good as any.
        batch, here = config.rollout.max_batch, config.rollout.max_inflight
        return [here, *sorted({batch, 2 * batch} - {here})]
    if path == REWARDERS:
        here = count(keys, path)
        return sorted({max(1, here // 2), max(1, here - 1), here, here + 1})
    raise ValueError(f"{path} has no short list of values")


# Splits are simulated only within this factor of the best by the law, and at most this many.
_FAR_OFF = 1.10
_MOST = 6
# Scoring without devices may take this share of the bottleneck's time, with at most this many times the recipe's
# workers.
_REWARD_SHARE = 0.8
_REWARD_GROWTH = 4
_POOL_GROWTH = 64
# Rounding error of sums of fractions of a device.
_ROUNDING = 1e-9


class Split(msgspec.Struct, frozen=True):
    """Workers of each role, their stage times by the law with enough staleness, and the slowest stage time."""

    keys: dict[str, int]
    times: StageTimes
    step_s: float


def device_kind(config: Config) -> Literal["gpus", "cpus"]:
    placement = config.placement
    return "gpus" if any(role.gpus for role in (placement.rollout, placement.reward, placement.trainer)) else "cpus"


def devices_each(config: Config) -> dict[str, float]:
    """Return the devices that one worker of each role takes; 0 for reward workers that the job does not have."""
    kind, placement = device_kind(config), config.placement
    roles = ((ENGINES, placement.rollout), (REWARDERS, placement.reward), (RANKS, placement.trainer))
    each = {path: float(getattr(resources, kind)) for path, resources in roles}
    return each | {REWARDERS: 0.0} if config.unscored else each


def share_cpus(config: Config, devices: int, kept: Keys) -> bool:
    """Return whether the roles run on fewer CPUs than they take together; the operating system then shares them.

    The numbers of workers are then the recipe's.

    Args:
        config: the job.
        devices: number of CPUs or accelerators.
        kept: keys that stay; each other role counts with its smallest possible number of workers."""
    return device_kind(config) == "cpus" and sum(_fewest_needed(config, kept).values()) > devices + _ROUNDING


def ranked_splits(config: Config, profile: Profile, devices: int, kept: Keys) -> list[Split]:
    """Return every split that uses up the devices, best first; only the kept split if CPUs are shared.

    Args:
        config: The job.
        profile: Its service times.
        devices: Number of devices.
        kept: Keys that stay; a role whose number of workers is kept may leave some devices idle.

    Raises:
        ConfigError: There are too few accelerators."""
    by_law = partial(split_by_law, config, profile)
    if share_cpus(config, devices, kept):
        return [by_law(kept)]
    needed = _fewest_needed(config, kept)
    if sum(needed.values()) > devices + _ROUNDING:
        parts = " + ".join(f"{path.split('.')[0]} {value:g}" for path, value in needed.items())
        raise ConfigError(
            f"--devices: {devices} {device_kind(config)} are fewer than the roles take at least: {parts} ="
            f" {sum(needed.values()):g}"
        )
    found = map(by_law, _splits(config, by_law, devices, kept))
    return sorted(found, key=lambda split: (split.step_s, split.times.latency))


def worth_simulating(config: Config, ranked: Sequence[Split]) -> list[Split]:
    """Return the first splits that the schema accepts. Raises ConfigError if it accepts none."""
    problems = [check(with_keys(config, _roomy(config, split.keys))) for split in ranked]
    allowed = [split for split, problem in zip(ranked, problems, strict=True) if problem is None]
    if not allowed:
        raise ConfigError(problems[0] or "")
    return [split for split in allowed if split.step_s <= allowed[0].step_s * _FAR_OFF][:_MOST]


def split_by_law(config: Config, profile: Profile, keys: Keys) -> Split:
    """Return the split with given numbers of workers, and its stage times by the law.

    Args:
        config: the job.
        profile: its service times.
        keys: all tuned keys; only the numbers of workers are read."""
    workers = {path: count(keys, path) for path in SPLIT}
    # With a budget: at S = 0 the law counts whole rounds of jobs.
    times = times_of(with_keys(config, _roomy(config, workers)), profile, plan_updates(config))
    return Split(workers, times, times.bottleneck[1])


def _roomy(config: Config, workers: dict[str, int]) -> dict[str, Value]:
    return roomy(config, workers, max(1, config.staleness.max_updates))


def _fewest_needed(config: Config, kept: Keys) -> dict[str, float]:
    """Return the devices of each role that takes any, with the kept or the smallest possible number of workers."""
    fewest = {ENGINES: 1, REWARDERS: 1, RANKS: config.trainer.fewest_ranks}
    fewest |= {path: count(kept, path) for path in SPLIT if path in kept}
    return {path: fewest[path] * each for path, each in devices_each(config).items() if each}


def _splits(config: Config, by_law: Callable[[Keys], Split], devices: int, kept: Keys) -> Iterator[dict[str, int]]:
    """Yield every number of ranks and of reward workers, with as many engines as then fit."""
    each = devices_each(config)
    for ranks in _useful_ranks(config, _counts(config.trainer.workers, each[RANKS], devices, kept.get(RANKS))):
        left = devices - ranks * each[RANKS]
        for rewarders in _counts(config.reward.workers, each[REWARDERS], left, kept.get(REWARDERS)):
            rest = left - rewarders * each[REWARDERS]
            engines = list(_counts(config.rollout.workers, each[ENGINES], rest, kept.get(ENGINES)))
            if not engines:
                continue
            split = {ENGINES: engines[-1], REWARDERS: rewarders, RANKS: ranks}
            if not each[REWARDERS] and REWARDERS not in kept:
                split[REWARDERS] = _enough_rewarders(config, by_law({**split, REWARDERS: 1}).times)
            yield split


def _useful_ranks(config: Config, counts: range) -> Iterator[int]:
    """Yield the numbers of ranks that training accepts and that reduce the busiest rank's load."""
    least = math.inf
    for ranks in counts:
        trainer = replace(config.trainer, workers=ranks)
        if not any(layout_problems(ranks, trainer.sequence_parallel, trainer.shard)):
            share = samples_per_rank(replace(config, trainer=trainer))
            if share < least:
                yield ranks
            least = min(least, share)


class PoolSize(msgspec.Struct, frozen=True):
    """The time of a pool of scorers for an update, and the number of workers that keeps it below the bottleneck.

    `others_s`: the slower of generation and training. `enough`: None if no number of workers is enough."""

    name: str
    workers: int
    takes_s: float
    others_s: float
    enough: int | None


def pool_sizes(config: Config, profile: Profile, keys: Keys) -> list[PoolSize]:
    """Size the pools of `reward.pools` for a setting, by the law; their workers take none of the devices to split.

    Args:
        config: the job.
        profile: its service times.
        keys: all tuned keys."""
    times = split_by_law(config, profile, keys).times
    others = max(times.generate + times.pause, times.train + times.blocked)
    found = []
    for pool in config.reward.pools:
        takes = partial(pool_time, config, profile, pool.name)
        looked_at = range(1, max(pool.workers, 1) * _POOL_GROWTH + 1)
        enough = next((n for n in looked_at if takes(n) <= _REWARD_SHARE * others), None)
        found.append(PoolSize(pool.name, pool.workers, takes(pool.workers), others, enough))
    return found


def _counts(recipe: int, each: float, devices: float, kept: Value | None) -> range:
    """Return the numbers of workers that fit: the recipe's if they take no devices, the kept one, or any."""
    fitting = math.floor(devices / each + _ROUNDING) if each else recipe
    if kept is not None:
        return range(int(kept), min(fitting, int(kept)) + 1)
    return range(1 if each else recipe, fitting + 1)


def _enough_rewarders(config: Config, times: StageTimes) -> int:
    """Return the number of reward workers that stays below the bottleneck. `times`: with one worker."""
    others = max(times.generate + times.pause, times.train + times.blocked)
    needed = math.ceil(times.score / (_REWARD_SHARE * others)) if others > 0 else 1
    return max(1, min(needed, _REWARD_GROWTH * config.reward.workers))
