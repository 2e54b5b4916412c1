"""Lists how N devices can be split between the roles, best first by the law.

Only what is close to the best needs to be simulated.

Devices are accelerators where the recipe places any role on them, else CPUs. A worker takes what `placement.<role>`
says. A role whose workers take none keeps the recipe's number of workers; reward workers beside the devices are as many
as keep scoring well below the bottleneck. CPUs fewer than a worker of each role takes are shared, as accelerators are
not: then there is nothing to split.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from omni_async.actors.plan import plan_updates
from omni_async.algorithms.kinds import samples_per_rank
from omni_async.config import Config, ConfigError
from omni_async.config.checks import check
from omni_async.layout import layout_problems
from omni_async.performance.law import StageTimes
from omni_async.performance.profile import Profile
from omni_async.performance.stages import with_estimates
from omni_async.simulation.result import times_of
from omni_async.tune.keys import ENGINES, RANKS, REWARDERS, SPLIT, Keys, Value, count, roomy, with_keys

# Splits whose law is further off the best than this are not simulated; nor more than this many.
_FAR_OFF = 1.10
_MOST = 6
# Scoring beside the devices may take this share of the bottleneck's time, with at most this many times the recipe's
# workers.
_REWARD_SHARE = 0.8
_REWARD_GROWTH = 4
# Rounding error of sums of fractions of a device.
_ROUNDING = 1e-9


class Split(msgspec.Struct, frozen=True):
    """Workers of each role, the stage times the law gives them with enough staleness, and the slowest of these."""

    keys: dict[str, int]
    times: StageTimes
    step_s: float


def device_kind(config: Config) -> Literal["gpus", "cpus"]:
    placement = config.placement
    return "gpus" if any(role.gpus for role in (placement.rollout, placement.reward, placement.trainer)) else "cpus"


def devices_each(config: Config) -> dict[str, float]:
    """Return the devices that one worker of each role takes."""
    kind, placement = device_kind(config), config.placement
    roles = ((ENGINES, placement.rollout), (REWARDERS, placement.reward), (RANKS, placement.trainer))
    return {path: float(getattr(resources, kind)) for path, resources in roles}


def share_cpus(config: Config, devices: int, kept: Keys) -> bool:
    """Return whether the roles run on fewer CPUs than they take together, as an operating system lets them.

    Their numbers are then the recipe's."""
    return device_kind(config) == "cpus" and sum(_fewest_needed(config, kept).values()) > devices + _ROUNDING


def ranked_splits(config: Config, profile: Profile, devices: int, kept: Keys) -> list[Split]:
    """Return every split that uses the devices up, best first; the kept split alone where CPUs are shared.

    Args:
        config: The job.
        profile: Its service times.
        devices: How many there are.
        kept: Keys that stay; a role whose number of workers is kept may leave some devices idle.

    Raises:
        ConfigError: There are too few accelerators.
    """
    law = _Law(config, profile)
    if share_cpus(config, devices, kept):
        return [law.of({path: count(kept, path) for path in SPLIT})]
    needed = _fewest_needed(config, kept)
    if sum(needed.values()) > devices + _ROUNDING:
        parts = " + ".join(f"{path.split('.')[0]} {value:g}" for path, value in needed.items())
        raise ConfigError(
            f"--devices: {devices} {device_kind(config)} are fewer than the roles take at least: {parts} ="
            f" {sum(needed.values()):g}"
        )
    found = [law.of(keys) for keys in _splits(law, devices, kept)]
    found.sort(key=lambda split: (split.step_s, split.times.latency))
    return found


def worth_simulating(config: Config, ranked: Sequence[Split]) -> list[Split]:
    """Return the first splits, without those that the schema refuses. Raises ConfigError if that leaves none."""
    problems = [check(with_keys(config, _roomy(config, split.keys))) for split in ranked]
    allowed = [split for split, problem in zip(ranked, problems, strict=True) if problem is None]
    if not allowed:
        raise ConfigError(problems[0] or "")
    return [split for split in allowed if split.step_s <= allowed[0].step_s * _FAR_OFF][:_MOST]


def split_by_law(config: Config, profile: Profile, keys: Keys) -> Split:
    """Return the split with these numbers of workers, whatever the other keys say."""
    return _Law(config, profile).of({path: count(keys, path) for path in SPLIT})


class _Law:
    """The law for one job on any split, with a budget: at S = 0 it counts whole rounds of jobs."""

    def __init__(self, config: Config, profile: Profile) -> None:
        self.config = config
        self._profile = with_estimates(profile, config)
        self._plan = plan_updates(config)

    def of(self, workers: dict[str, int]) -> Split:
        times = times_of(with_keys(self.config, _roomy(self.config, workers)), self._profile, self._plan)
        return Split(workers, times, times.bottleneck[1])


def _roomy(config: Config, workers: dict[str, int]) -> dict[str, Value]:
    return roomy(config, workers, max(1, config.staleness.max_updates))


def _fewest_needed(config: Config, kept: Keys) -> dict[str, float]:
    """Return the devices of each role that takes any, with the kept number of workers or as few as can be."""
    fewest = {ENGINES: 1, REWARDERS: 1, RANKS: config.trainer.fewest_ranks}
    fewest |= {path: count(kept, path) for path in SPLIT if path in kept}
    return {path: fewest[path] * each for path, each in devices_each(config).items() if each}


def _splits(law: _Law, devices: int, kept: Keys) -> Iterator[dict[str, int]]:
    """Yield every number of ranks and of reward workers, with as many engines as then fit."""
    config = law.config
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
                split[REWARDERS] = _enough_rewarders(law, split)
            yield split


def _useful_ranks(config: Config, counts: range) -> Iterator[int]:
    """Yield the numbers of ranks that training accepts and that leave the busiest rank less than fewer do."""
    least = math.inf
    for ranks in counts:
        trainer = replace(config.trainer, workers=ranks)
        if not any(layout_problems(ranks, trainer.sequence_parallel, trainer.shard)):
            share = samples_per_rank(replace(config, trainer=trainer))
            if share < least:
                yield ranks
            least = min(least, share)


def _counts(recipe: int, each: float, devices: float, kept: Value | None) -> range:
    """Return the numbers of workers that fit: the recipe's if they take no devices, the kept one, or any."""
    fitting = math.floor(devices / each + _ROUNDING) if each else recipe
    if kept is not None:
        return range(int(kept), min(fitting, int(kept)) + 1)
    return range(1 if each else recipe, fitting + 1)


def _enough_rewarders(law: _Law, split: dict[str, int]) -> int:
    times = law.of({**split, REWARDERS: 1}).times
    others = max(times.generate + times.pause, times.train + times.blocked)
    needed = math.ceil(times.score / (_REWARD_SHARE * others)) if others > 0 else 1
    return max(1, min(needed, _REWARD_GROWTH * law.config.reward.workers))
