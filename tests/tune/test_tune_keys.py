"""Tests the tuned keys: how they are set and read, and what moves along when one of them changes."""

from __future__ import annotations

import pytest

from omni_async.config.checks import check
from omni_async.tune.keys import (
    ENGINES,
    GROUPS,
    INFLIGHT,
    PUBLISH,
    RANKS,
    REWARDERS,
    SWAP,
    TRAJECTORIES,
    TUNED,
    WINDOW,
    S,
    dealt,
    fewest_trajectories,
    keys_of,
    moved,
    roomy,
    values,
    with_keys,
)
from tests.tune.tune_world import job

SPLIT = {ENGINES: 3, REWARDERS: 2, RANKS: 1}


def test_keys_that_are_set_are_read_back():
    keys = roomy(job(), SPLIT, 3)
    assert keys_of(with_keys(job(), keys), TUNED) == keys
    assert set(keys) == set(TUNED)


@pytest.mark.parametrize("max_updates", [0, 1, 4])
def test_roomy_buffers_hold_everything_that_is_admitted(max_updates):
    config = with_keys(job(), roomy(job(), SPLIT, max_updates))
    assert config.buffer.groups == (max_updates + 1) * 4
    assert config.buffer.trajectories == (max_updates + 1) * 4 * 8
    assert check(config) is None


def test_engines_get_slots_for_their_batch_where_the_recipe_gives_less():
    assert roomy(job(rollout={"max_inflight": 2}), SPLIT, 1)[INFLIGHT] == 4
    assert roomy(job(rollout={"max_inflight": 32}), SPLIT, 1)[INFLIGHT] == 32


@pytest.mark.parametrize(("path", "value"), [(S, 1), (S, 5), (PUBLISH, 2), (WINDOW, 4)])
def test_what_needs_more_groups_gets_slots_for_all_that_are_admitted(path, value):
    tight = {**roomy(job(), SPLIT, 3), GROUPS: 5}
    after = moved(job(), tight, path, value)
    assert after[path] == value
    assert after[GROUPS] == (int(after[S]) + 1) * 4


def test_publishing_stays_allowed_when_the_budget_shrinks():
    keys = {**roomy(job(), SPLIT, 3), PUBLISH: 4}
    after = moved(job(), keys, S, 1)
    assert after[PUBLISH] == 2
    assert check(with_keys(job(), after)) is None


def test_trajectory_slots_go_with_the_split_and_never_cut_the_engines_batches():
    keys = {**roomy(job(), SPLIT, 2), TRAJECTORIES: 16}  # 3 engines x 4 + 2 reward workers x 2
    assert moved(job(), keys, ENGINES, 6)[TRAJECTORIES] == 28
    assert moved(job(), keys, TRAJECTORIES, 1)[TRAJECTORIES] == 12 == fewest_trajectories(job(), keys)
    assert dealt(job(), keys, {ENGINES: 6, REWARDERS: 2, RANKS: 2}) == {**keys, ENGINES: 6, RANKS: 2, TRAJECTORIES: 28}


def test_a_job_smaller_than_its_engines_needs_no_more_slots_than_samples():
    keys = roomy(job(rollout={"max_batch": 64, "max_inflight": 64}), SPLIT, 0)
    assert fewest_trajectories(job(rollout={"max_batch": 64, "max_inflight": 64}), keys) == 32


def test_nothing_moves_along_when_nothing_changes():
    keys = {**roomy(job(), SPLIT, 3), GROUPS: 5, TRAJECTORIES: 13}
    for path in TUNED:
        assert moved(job(), keys, path, keys[path]) == keys


def test_the_plainest_value_is_tried_first():
    keys = roomy(job(), {**SPLIT, REWARDERS: 6}, 3)
    assert values(job(), keys, SWAP)[0] == "step"
    assert values(job(), keys, PUBLISH) == [1, 2, 4]
    assert values(job(), {**keys, S: 1}, PUBLISH) == [1, 2]
    assert values(job(), keys, WINDOW) == [1, 2, 4]
    assert values(job(), keys, REWARDERS) == [3, 5, 6, 7]
    assert values(job(rollout={"max_inflight": 6}), keys, INFLIGHT) == [6, 4, 8]
    with pytest.raises(ValueError, match=GROUPS):
        values(job(), keys, GROUPS)
