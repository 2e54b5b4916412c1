"""Tests the tuned keys and how devices are split: what moves along when a key changes, which splits there are, which of
them are simulated, and what is refused."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from msgspec.structs import replace

from omni_async.config import ConfigError
from omni_async.config.checks import check
from omni_async.config.schema import Resources, Scorer
from omni_async.config.stages import Pool
from omni_async.performance.profile import ScorerTime, ServiceTime
from omni_async.simulation.tune import keys as key
from omni_async.simulation.tune.keys import (
    ENGINES,
    GROUPS,
    INFLIGHT,
    PUBLISH,
    RANKS,
    REWARDERS,
    SWAP,
    TRAJECTORIES,
    WINDOW,
    S,
)
from tests.simulation.tune.tune_world import GPU, PROFILE, job


def keys(split):
    return split.keys[ENGINES], split.keys[REWARDERS], split.keys[RANKS]


def ranked(config, devices, kept=None, profile=PROFILE):
    return key.ranked_splits(config, profile, devices, kept or {})


@pytest.mark.parametrize(
    ("degrees", "useful"),
    [
        ({}, (1, 2, 3, 4)),  # the busiest of them has 8, 4, 3 and 2 samples of a group of 8, and of five no fewer
        ({"workers": 2, "sequence_parallel": 2}, (2, 4)),
        ({"workers": 3, "shard": 3}, (3,)),
    ],
)
def test_every_split_uses_all_devices_and_no_rank_for_nothing(degrees, useful):
    found = {keys(split) for split in ranked(job(placement={"reward": GPU}, trainer=degrees), 7)}
    assert found == {(7 - ranks - rewarders, rewarders, ranks) for ranks in useful for rewarders in range(1, 7 - ranks)}


def test_ranks_are_as_slow_as_the_one_that_has_most_of_a_group():
    def train_s(workers, sequence=1):
        config = job(trainer={"workers": workers, "sequence_parallel": sequence})
        return key.split_by_law(config, PROFILE, {ENGINES: 1, REWARDERS: 1, RANKS: workers}).times.train

    # Four groups of 8, half a second a sample.
    assert [train_s(workers) for workers in (1, 3, 5, 7, 8, 9)] == pytest.approx([16, 6, 4, 4, 2, 2])
    assert [train_s(6, sequence) for sequence in (2, 3)] == pytest.approx([3, 8 / 3])


def test_reward_workers_beside_the_devices_are_as_many_as_stay_below_the_bottleneck():
    [best] = [split for split in ranked(job(), 6) if split.keys[RANKS] == 2]
    # 4 engines take 8.1 s, 2 ranks 8 s; one reward worker would take 8 s, two take 4.
    assert keys(best) == (4, 2, 2)
    assert best.times.score == pytest.approx(4.0)
    slow = replace(PROFILE, score=PROFILE.score.scaled(100))  # but no more than four times the recipe's
    assert {split.keys[REWARDERS] for split in ranked(job(), 4, profile=slow)} == {4}


def test_the_best_split_by_the_law_comes_first_and_far_ones_are_not_simulated():
    found = ranked(job(), 6)
    assert [split.step_s for split in found] == sorted(split.step_s for split in found)
    worth = key.worth_simulating(job(), found)
    assert worth[0] == found[0] and worth[0].keys[RANKS] == 2 and len(worth) < len(found)
    assert all(split.step_s <= 1.1 * found[0].step_s for split in worth)


def test_workers_take_what_placement_says():
    config = job(placement={"rollout": Resources(gpus=2.0), "trainer": Resources(gpus=0.5)})
    assert key.device_kind(config) == "gpus"
    for split in ranked(config, 5):
        used = sum(Fraction(each) * split.keys[path] for path, each in key.devices_each(config).items())
        assert 3 < used <= 5
    # Without accelerators CPUs are dealt, and reward workers count.
    config = job(placement={"rollout": Resources(), "reward": Resources(), "trainer": Resources()})
    assert key.device_kind(config) == "cpus" and {sum(keys(split)) for split in ranked(config, 5)} == {5}
    # Workers that take no devices or are kept stay, even if devices are left over.
    config = job(placement={"trainer": Resources()}, trainer={"workers": 3})
    assert {split.keys[RANKS] for split in ranked(config, 4)} == {3}
    found = ranked(job(trainer={"workers": 3}), 6, {ENGINES: 2, RANKS: 3})
    assert {(split.keys[ENGINES], split.keys[RANKS]) for split in found} == {(2, 3)}


@pytest.mark.parametrize(
    ("config", "devices", "kept", "parts"),
    [
        (job(), 1, {}, "rollout 1 + trainer 1 = 2"),
        (job(placement={"reward": GPU}), 2, {}, "rollout 1 + reward 1 + trainer 1 = 3"),
        (job(placement={"rollout": Resources(gpus=4.0)}), 4, {}, "rollout 4 + trainer 1 = 5"),
        (job(), 4, {RANKS: 4}, "rollout 1 + trainer 4 = 5"),
        (job(trainer={"workers": 6, "sequence_parallel": 2, "shard": 3}), 6, {}, "rollout 1 + trainer 6 = 7"),
    ],
)
def test_too_few_devices_are_refused_with_what_would_do(config, devices, kept, parts):
    with pytest.raises(ConfigError, match=f"--devices: {devices} gpus are fewer than.*{re.escape(parts)}"):
        ranked(config, devices, kept)


def test_splits_that_the_schema_refuses_are_left_out_and_if_it_refuses_all_it_says_why():
    config = job(run={"runtime": "inprocess"}, rollout={"engine": "diffusers"})
    worth = key.worth_simulating(config, ranked(config, 6))
    assert {split.keys[RANKS] for split in worth} == {1}
    config = job(trainer={"backend": "plain", "workers": 2})
    with pytest.raises(ConfigError, match=r"trainer\.backend: 'plain' is one rank"):
        key.worth_simulating(config, ranked(config, 4, {RANKS: 2}))


SPLIT = {ENGINES: 3, REWARDERS: 2, RANKS: 1}


@pytest.mark.parametrize("max_updates", [0, 1, 4])
def test_roomy_buffers_hold_everything_that_is_admitted(max_updates):
    keys = key.roomy(job(), SPLIT, max_updates)
    config = key.with_keys(job(), keys)
    assert key.keys_of(config, key.TUNED) == keys and set(keys) == set(key.TUNED)
    assert config.buffer.groups == (max_updates + 1) * 4
    assert config.buffer.trajectories == (max_updates + 1) * 4 * 8
    assert check(config) is None
    # Engines get slots for their batch where the recipe gives less.
    assert key.roomy(job(rollout={"max_inflight": 2}), SPLIT, 1)[INFLIGHT] == 4
    assert key.roomy(job(rollout={"max_inflight": 32}), SPLIT, 1)[INFLIGHT] == 32


@pytest.mark.parametrize(("path", "value"), [(S, 1), (S, 5), (PUBLISH, 2), (WINDOW, 4)])
def test_what_needs_more_groups_gets_slots_for_all_that_are_admitted(path, value):
    tight = {**key.roomy(job(), SPLIT, 3), GROUPS: 5}
    after = key.moved(job(), tight, path, value)
    assert after[path] == value
    assert after[GROUPS] == (int(after[S]) + 1) * 4
    after = key.moved(job(), {**tight, PUBLISH: 4}, S, 1)  # publishing stays allowed when the budget shrinks
    assert after[PUBLISH] == 2
    assert check(key.with_keys(job(), after)) is None
    assert all(key.moved(job(), tight, path, tight[path]) == tight for path in key.TUNED), "nothing changes"


def test_trajectory_slots_go_with_the_split_and_never_cut_the_engines_batches():
    keys = {**key.roomy(job(), SPLIT, 2), TRAJECTORIES: 16}  # 3 engines x 4 + 2 reward workers x 2
    assert key.moved(job(), keys, ENGINES, 6)[TRAJECTORIES] == 28
    assert key.moved(job(), keys, TRAJECTORIES, 1)[TRAJECTORIES] == 12 == key.fewest_trajectories(job(), keys)
    assert key.dealt(job(), keys, {ENGINES: 6, REWARDERS: 2, RANKS: 2}) == {
        **keys,
        ENGINES: 6,
        RANKS: 2,
        TRAJECTORIES: 28,
    }
    small = job(rollout={"max_batch": 64, "max_inflight": 64})  # smaller than its engines: one slot for each sample
    assert key.fewest_trajectories(small, key.roomy(small, SPLIT, 0)) == 32


def test_the_plainest_value_is_tried_first():
    keys = key.roomy(job(), {**SPLIT, REWARDERS: 6}, 3)
    assert key.values(job(), keys, SWAP)[0] == "step"
    assert key.values(job(), keys, PUBLISH) == [1, 2, 4]
    assert key.values(job(weights={"publish_every": 3}), keys, PUBLISH) == [1, 2, 3, 4]
    assert key.values(job(), {**keys, S: 1}, PUBLISH) == [1, 2]
    assert key.values(job(), keys, WINDOW) == [1, 2, 4]
    assert key.values(job(), keys, REWARDERS) == [3, 5, 6, 7]
    assert key.values(job(rollout={"max_inflight": 6}), keys, INFLIGHT) == [6, 4, 8]
    with pytest.raises(ValueError, match=GROUPS):
        key.values(job(), keys, GROUPS)


def test_a_pool_is_told_how_many_workers_keep_it_below_the_bottleneck():
    # 32 samples an update: 32 s of generation and 16 s of training, 32 x 4 s of judging in 2 calls at once.
    profile = replace(PROFILE, scorers={"judge": ScorerTime(ServiceTime(unit_s=4.0)), "ocr": ScorerTime(PROFILE.score)})
    scorers = (Scorer(name="ocr"), Scorer(name="judge", pool="judges", concurrency=2, batch=1))

    def sizes(workers: int) -> list[key.PoolSize]:
        pools = (Pool(name="judges", workers=workers), Pool(name="idle"))
        config = job(reward={"scorers": scorers, "pools": pools, "workers": 1})
        return key.pool_sizes(config, profile, key.keys_of(config, key.TUNED) | {ENGINES: 1, RANKS: 1})

    for workers, takes in ((1, 64.0), (3, 64.0 / 3), (8, 8.0)):
        judges, idle = sizes(workers)
        assert (judges.name, judges.workers, judges.enough) == ("judges", workers, 3)
        assert judges.takes_s == pytest.approx(takes) and judges.others_s == pytest.approx(32, rel=0.05)
        assert (idle.takes_s, idle.enough) == (0.0, 1)
