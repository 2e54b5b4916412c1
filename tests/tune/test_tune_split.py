"""Tests how devices are split: which splits there are, which of them are simulated, and what is refused."""

from __future__ import annotations

from fractions import Fraction

import pytest
from msgspec.structs import replace

from omni_async.config import ConfigError
from omni_async.config.schema import Placement, Resources
from omni_async.tune.keys import ENGINES, RANKS, REWARDERS
from omni_async.tune.split import device_kind, devices_each, ranked_splits, split_by_law, worth_simulating
from tests.tune.tune_world import GPU, PROFILE, job

ON_GPUS = Placement(rollout=GPU, reward=GPU, trainer=GPU)


def keys(split):
    return split.keys[ENGINES], split.keys[REWARDERS], split.keys[RANKS]


@pytest.mark.parametrize(
    ("degrees", "useful"),
    [
        ({}, (1, 2, 3, 4)),  # the busiest of them has 8, 4, 3 and 2 samples of a group of 8, and of five no fewer
        ({"workers": 2, "sequence_parallel": 2}, (2, 4)),
        ({"workers": 3, "shard": 3}, (3,)),
    ],
)
def test_every_split_uses_all_devices_and_no_rank_for_nothing(degrees, useful):
    found = {keys(split) for split in ranked_splits(job(placement={"reward": GPU}, trainer=degrees), PROFILE, 7, {})}
    assert found == {(7 - ranks - rewarders, rewarders, ranks) for ranks in useful for rewarders in range(1, 7 - ranks)}


def test_ranks_are_as_slow_as_the_one_that_has_most_of_a_group():
    def train_s(workers, sequence=1):
        config = job(trainer={"workers": workers, "sequence_parallel": sequence})
        return split_by_law(config, PROFILE, {ENGINES: 1, REWARDERS: 1, RANKS: workers}).times.train

    # Four groups of 8, half a second a sample.
    assert [train_s(workers) for workers in (1, 3, 5, 7, 8, 9)] == pytest.approx([16, 6, 4, 4, 2, 2])
    assert [train_s(6, sequence) for sequence in (2, 3)] == pytest.approx([3, 8 / 3])


def test_reward_workers_beside_the_devices_are_as_many_as_stay_below_the_bottleneck():
    [best] = [split for split in ranked_splits(job(), PROFILE, 6, {}) if split.keys[RANKS] == 2]
    # 4 engines take 8.1 s, 2 ranks 8 s; one reward worker would take 8 s, two take 4.
    assert keys(best) == (4, 2, 2)
    assert best.times.score == pytest.approx(4.0)


def test_reward_workers_beside_the_devices_stay_within_four_times_the_recipes():
    slow = replace(PROFILE, score=PROFILE.score.scaled(100))
    assert {split.keys[REWARDERS] for split in ranked_splits(job(), slow, 4, {})} == {4}


def test_the_best_split_by_the_law_comes_first_and_far_ones_are_not_simulated():
    config = job()
    ranked = ranked_splits(config, PROFILE, 6, {})
    assert [split.step_s for split in ranked] == sorted(split.step_s for split in ranked)
    assert ranked[0].keys[RANKS] == 2
    worth = worth_simulating(config, ranked)
    assert worth[0] == ranked[0]
    assert all(split.step_s <= 1.1 * ranked[0].step_s for split in worth)
    assert len(worth) < len(ranked)


def test_workers_take_what_placement_says():
    config = job(placement={"rollout": Resources(gpus=2.0), "trainer": Resources(gpus=0.5)})
    assert device_kind(config) == "gpus"
    for split in ranked_splits(config, PROFILE, 5, {}):
        used = sum(Fraction(each) * split.keys[path] for path, each in devices_each(config).items())
        assert 3 < used <= 5


def test_without_accelerators_cpus_are_dealt_and_rewards_count():
    config = job(placement={"rollout": Resources(), "reward": Resources(), "trainer": Resources()})
    assert device_kind(config) == "cpus"
    assert {sum(keys(split)) for split in ranked_splits(config, PROFILE, 5, {})} == {5}


def test_a_role_without_devices_keeps_the_recipes_workers():
    config = job(placement={"trainer": Resources()}, trainer={"workers": 3})
    assert {split.keys[RANKS] for split in ranked_splits(config, PROFILE, 4, {})} == {3}


def test_kept_workers_stay_even_if_devices_are_left_over():
    found = ranked_splits(job(trainer={"workers": 3}), PROFILE, 6, {ENGINES: 2, RANKS: 3})
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
    with pytest.raises(ConfigError, match="--devices: ") as error:
        ranked_splits(config, PROFILE, devices, kept)
    assert f"{devices} gpus are fewer than" in str(error.value)
    assert parts in str(error.value)


def test_splits_that_the_schema_refuses_are_left_out():
    config = job(run={"runtime": "inprocess"}, rollout={"engine": "diffusers"})
    worth = worth_simulating(config, ranked_splits(config, PROFILE, 6, {}))
    assert {split.keys[RANKS] for split in worth} == {1}


def test_if_the_schema_refuses_all_splits_it_says_why():
    config = job(trainer={"backend": "plain", "workers": 2})
    with pytest.raises(ConfigError, match=r"trainer\.backend: 'plain' is one rank"):
        worth_simulating(config, ranked_splits(config, PROFILE, 4, {RANKS: 2}))


def test_the_law_of_a_split_looks_at_the_workers_alone():
    config = job()
    split = ranked_splits(config, PROFILE, 6, {})[0]
    assert split_by_law(config, PROFILE, {**split.keys, "buffer.groups": 1, "staleness.max_updates": 0}) == split
