"""Lists the changes of one key that are worth evaluating, their requirements, and why others cannot be made.

A change is what a user would set in the recipe: the key, and further keys without which it could not show its effect (a
slot for every group that a larger staleness budget admits, full batches for one more engine).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any, NamedTuple

from msgspec.structs import replace

from omni_async.algorithms.kinds import samples_per_rank
from omni_async.config import Config, check
from omni_async.config.layout import layout_problems
from omni_async.config.reward import Scorer
from omni_async.config.schedule import SCHEDULES, apply_schedule
from omni_async.control.reward_formula import RewardFormula
from omni_async.performance.profile import Profile
from omni_async.performance.scorer_lanes import scorer_lanes

Keys = Mapping[str, int | str]

_S = "staleness.max_updates"
_TURNS = "roles take turns on the same devices, which `omni-async tune RECIPE --devices N` deals with schedule: async"


class Change(NamedTuple):
    """One change of a job: its name, the keys that make it, and the resulting job.

    `problem`: why it cannot be made; then there are no keys."""

    name: str
    keys: Keys
    config: Config
    problem: str | None = None


def changes(config: Config, profile: Profile) -> Iterator[Change]:
    """Yield the changes of a job, including impossible ones.

    Args:
        config: The job.
        profile: Its service times, which determine the slowest scorer."""
    build = _ChangeBuilder(config)
    yield from _budgets(build)
    yield from _publishes(build)
    yield from _buffers(build)
    yield _engine(build)
    if not config.unscored:
        yield _reward_worker(build, profile)
    yield _ranks(build)


def with_keys(config: Config, keys: Keys) -> Config:
    """Return the job with keys set as on the command line, such as `reward.pools.0.workers`; nothing is checked."""
    config = reduce(lambda found, item: _with(found, item[0].split("."), item[1]), keys.items(), config)
    return apply_schedule(config) if "schedule" in keys else config


def _with(section: Any, path: list[str], value: int | str) -> Any:
    if not path:
        return value
    first, *rest = path
    if isinstance(section, tuple):
        number = int(first)
        return (*section[:number], _with(section[number], rest, value), *section[number + 1 :])
    return replace(section, **{first: _with(getattr(section, first), rest, value)})


class _ChangeBuilder:
    """Builds the changes of one job."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.per_update = config.trainer.groups_per_update

    def change(self, name: str, keys: Keys) -> Change:
        config = with_keys(self.config, keys)
        problem = check(config)
        return self.left_out(name, problem) if problem is not None else Change(name, keys, config)

    def left_out(self, name: str, why: str) -> Change:
        return Change(name, {}, self.config, why)

    def decided(self, key: str) -> bool:
        """Return whether the job's schedule sets that key, overriding the recipe."""
        return self.config.schedule is not None and key in SCHEDULES[self.config.schedule]


# ---- staleness, publishes, buffers -----------------------------------------------------------------------------------


def _budgets(build: _ChangeBuilder) -> Iterator[Change]:
    """Yield the budgets 0, S - 1, S + 1 and S + 2, each with a slot for every group that it admits."""
    now = build.config.staleness.max_updates
    if build.config.placement.colocated:
        yield build.left_out(f"S = {now + 1}", _TURNS)
        return
    for budget in sorted({0, max(0, now - 1), now + 1, now + 2} - {now}):
        keys: dict[str, int | str] = {"schedule": "async"} if build.decided(_S) else {}
        keys[_S] = budget
        if budget > now:
            keys |= _more(build.config, "buffer", "groups", (budget + 1) * build.per_update)
        if build.config.weights.publish_every > budget + 1:
            keys["weights.publish_every"] = budget + 1
        yield build.change(f"S = {budget}", keys)


def _publishes(build: _ChangeBuilder) -> Iterator[Change]:
    """Yield a publish after every update, and publishes half as often as now."""
    every = build.config.weights.publish_every
    if build.decided("weights.publish_every") or build.config.placement.colocated:
        return  # it is every update, the only possibility
    for interval in sorted({1, 2 * every} - {every}):
        yield build.change(f"publish every {interval}", {"weights.publish_every": interval})


def _buffers(build: _ChangeBuilder) -> Iterator[Change]:
    """Yield either buffer at half size, and at twice its size unless it has room for all that S admits."""
    config, buffer = build.config, build.config.buffer
    groups = (config.staleness.max_updates + 1) * build.per_update
    for name, size, most, fewest in (
        ("groups", buffer.groups, groups, build.per_update),
        ("trajectories", buffer.trajectories, groups * config.rollout.group_size, _full_batches(config, 0)),
    ):
        half, key = min(size, most) // 2, f"buffer.{name}"
        if half >= fewest:
            yield build.change(f"{key} = {half}", {key: half})
        if size < most:
            yield build.change(f"{key} = {2 * size}", {key: 2 * size})
        else:
            yield build.left_out(f"{key} = {2 * size}", f"all {most} that S admits fit into {size}")


# ---- workers ---------------------------------------------------------------------------------------------------------


def _engine(build: _ChangeBuilder) -> Change:
    name, engines = "+1 rollout engine", build.config.rollout.workers + 1
    if build.config.placement.colocated:
        return build.left_out(name, _TURNS)
    slots = _more(build.config, "buffer", "trajectories", _full_batches(build.config, 1))
    return build.change(name, {"rollout.workers": engines, **slots})


def _reward_worker(build: _ChangeBuilder, profile: Profile) -> Change:
    """Return the change to one more worker for the slowest scorer."""
    reward, scorer = build.config.reward, _slowest_scorer(build.config, profile)
    if scorer.pool is not None:
        number, pool = next((i, pool) for i, pool in enumerate(reward.pools) if pool.name == scorer.pool)
        return build.change(f"+1 worker of pool {pool.name}", {f"reward.pools.{number}.workers": pool.workers + 1})
    name = "+1 reward worker"
    if any(scorer.params.get(key) for key in ("server", "urls")):
        return build.left_out(
            name,
            f"{scorer.name}, the slowest scorer, asks servers: what one more could answer is not in the profile, and a"
            " reward worker more would only ask",
        )
    if build.config.placement.reward_in_turn:
        return build.left_out(name, _TURNS)
    return build.change(name, {"reward.workers": reward.workers + 1})


def _slowest_scorer(config: Config, profile: Profile) -> Scorer:
    def seconds_per_sample(number: int) -> float:
        lane = lanes[number]
        return profile.scorer(lane.label).time.mean(lane.batch) / lane.batch / (lane.concurrency or lane.batch)

    lanes, scorers = scorer_lanes(config, profile), RewardFormula(config.reward).scorers
    return scorers[max(range(len(lanes)), key=seconds_per_sample)]


def _ranks(build: _ChangeBuilder) -> Change:
    """Return the smallest addition of ranks that reduces the busiest rank's share of a group."""
    config, ranks = build.config, build.config.trainer.workers
    name, share = f"+{config.trainer.fewest_ranks} trainer rank", samples_per_rank(config)
    if config.placement.colocated:
        return build.left_out(name, _TURNS)
    for more in range(1, max(ranks, config.trainer.fewest_ranks) + 1):
        trainer = replace(config.trainer, workers=ranks + more)
        if any(layout_problems(trainer.workers, trainer.sequence_parallel, trainer.shard)):
            continue
        if samples_per_rank(replace(config, trainer=trainer)) < share:
            return build.change(f"+{more} trainer rank{'s' * (more > 1)}", {"trainer.workers": trainer.workers})
    return build.left_out(
        name,
        f"the busiest of {ranks} ranks has {share:g} of the {config.rollout.group_size} samples of a group, and up to"
        f" {2 * ranks} ranks would leave it no fewer",
    )


def _full_batches(config: Config, more: int) -> int:
    """Return the trajectory slots for full batches of `more` additional engines, at most the samples that S admits."""
    rollout = config.rollout
    admitted = config.slots * rollout.group_size
    return min((rollout.workers + more) * min(rollout.max_batch, rollout.max_inflight), admitted)


def _more(config: Config, section: str, key: str, needed: int) -> dict[str, int | str]:
    return {f"{section}.{key}": needed} if getattr(getattr(config, section), key) < needed else {}
