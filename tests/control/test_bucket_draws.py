"""Tests that every group draws one of the buckets, the same one whenever and wherever it is made."""

from __future__ import annotations

from collections import Counter

import pytest
from control_world import SAMPLE_BYTES, Bench, hold, make_config, make_coordinator, now, play

from omni_async.control.requests import RequestFactory
from omni_async.control.seeds import draw_bucket
from omni_async.types import Prompt

WEIGHTS = (1.0, 2.0, 5.0)


def test_buckets_are_drawn_by_weight_and_depend_on_seed_and_number_alone() -> None:
    drawn = [draw_bucket(7, number, WEIGHTS) for number in range(4000)]
    counts = Counter(drawn)
    for bucket, weight in enumerate(WEIGHTS):
        assert counts[bucket] / 4000 == pytest.approx(weight / sum(WEIGHTS), abs=0.03)
    assert drawn[::-1] == [draw_bucket(7, number, WEIGHTS) for number in reversed(range(4000))]
    assert drawn != [draw_bucket(8, number, WEIGHTS) for number in range(4000)]


def test_all_samples_of_a_group_have_its_spec_and_validation_the_shared_one() -> None:
    config = make_config(group_size=3, buckets=WEIGHTS, validation={"every": 1})
    factory = RequestFactory(config)
    for number in range(20):
        requests = factory.training(number, Prompt(0, "x"), None, factory.bucket(number))
        assert [request.spec for request in requests] == [{"size": factory.bucket(number)}] * 3
    assert [request.spec for request in factory.validation(0, (Prompt(0, "x"),))] == [config.rollout.sampling]
    assert RequestFactory(make_config()).bucket(5) == 0


async def test_a_resumed_run_draws_the_same_buckets() -> None:
    config = make_config(S=3, P=1, updates=6, buckets=WEIGHTS)
    before = Bench(S=3, P=1, updates=6, buckets=WEIGHTS)

    for group in (0, 1):
        await before.generate(group, 0)
    taken = before.take()
    assert taken is not None and taken.bucket == draw_bucket(0, 0, WEIGHTS)
    await before.train(taken)
    kept = await before.c.continuation()
    after, _ = make_coordinator(config, start=kept)
    await hold(after, 1)
    (ready,) = await after.next_groups(1, 1)
    assert ready == kept.ready[0], "ready as it was, in the bucket that it was drawn from"
    for request in now(after.next_samples("rollout-0", 8, 8)):
        assert request.spec == {"size": draw_bucket(0, request.group, WEIGHTS)}


def test_rewards_are_reported_by_bucket() -> None:
    run = play(make_config(updates=8, P=4, buckets=WEIGHTS))
    groups = [[group for version, group in run.taken if version == number] for number in range(8)]
    for event, trained in zip((e for e in run.events if e.kind == "update"), groups, strict=True):
        assert event.data["buckets"].keys() == {group.bucket for group in trained}
        for bucket, mean in event.data["buckets"].items():
            rewards = [reward for group in trained if group.bucket == bucket for reward in group.rewards]
            assert mean == pytest.approx(sum(rewards) / len(rewards))


@pytest.mark.parametrize("seed", range(6))
def test_samples_of_several_sizes_stay_within_the_bound(seed: int) -> None:
    """The largest bucket decides what an update needs; smaller ones let more groups in."""
    bound = 2 * 2 * SAMPLE_BYTES
    config = make_config(S=4, P=2, updates=10, engines=2, buckets=WEIGHTS, max_bytes=bound, seed=seed)
    run = play(config, seed=seed)
    assert len(run.taken) == 20
    counted = [event.data["buffers"]["bytes"] for event in run.events if event.kind == "update"]
    assert max(bytes_["most"] for bytes_ in counted) <= bound
    assert max(bytes_["reserved"] for bytes_ in counted) <= bound
