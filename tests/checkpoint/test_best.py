"""Tests which checkpoints are kept for their validation reward, while rounds end late, fail, or are passed over."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_async.checkpoint.best import best_first, is_due, rounds_of, worth_keeping
from omni_async.config import Config
from omni_async.control.control_state import ControlState
from omni_async.control.rounds import Round
from tests.support.configs import build

VALIDATED = {"validation": {"every": 10, "prompts": "v.txt"}, "trainer": {"updates": 95}}


def config(**changes: Any) -> Config:
    return build(VALIDATED, {"checkpoint.every": 20, "staleness.max_updates": 2, **changes})


def control(rounds: dict[int, float | None], over: int | None) -> ControlState:
    return ControlState(validated=over, rounds=tuple(Round(version, reward) for version, reward in rounds.items()))


def test_every_validated_version_is_due_if_the_best_is_kept():
    def due(**changes: Any) -> list[int]:
        return [version for version in range(1, 96) if is_due(config(**changes), version)]

    assert due() == [10, 20, 30, 40, 50, 60, 70, 80, 90, 95]
    for without in ({"checkpoint.keep_best": 0}, {"validation": None}, {"emulation": {"profile": "p.json"}}):
        assert due(**without) == [20, 40, 60, 80]


@pytest.mark.parametrize(
    ("rounds", "over", "kept"),
    [
        ({}, None, {10, 20, 30}),  # none has ended yet
        ({0: 0.9, 10: 0.5}, 12, {10, 20, 30}),
        ({0: 0.9, 10: 0.5, 20: 0.4}, 22, {10, 30}),  # of the base model there is no checkpoint
        ({10: 0.5, 20: 0.5, 30: 0.4}, 32, {20}),  # of equal ones the newer
        ({10: 0.5, 22: 0.7, 30: 0.6}, 32, {20}),  # engines had taken over 22 by then
        ({10: 0.5, 23: 0.7, 30: 0.4}, 32, {10}),  # no version 23 can be held when 20 is due
        ({10: 0.5, 20: None, 30: float("nan")}, 32, {10}),  # rounds that failed have no reward
        ({}, 32, set()),
    ],
)
def test_the_best_and_pending_ones_are_kept(rounds, over, kept):
    assert worth_keeping(config(), {10, 20, 30}, control(rounds, over)) == kept
    assert worth_keeping(config(**{"checkpoint.keep_best": 0}), {10, 20, 30}, control(rounds, over)) == set()


@given(st.dictionaries(st.integers(0, 9), st.floats(0, 1)), st.integers(1, 4))
def test_as_many_are_kept_as_was_asked_for(found, most):
    rounds = {10 * number: reward for number, reward in found.items()}
    versions = {10 * number for number in range(1, 10)}
    kept = worth_keeping(config(**{"checkpoint.keep_best": most}), versions, control(rounds, 95))
    measured = rounds_of(config(), versions, control(rounds, 95).rounds)
    rewards = {version: one.reward or 0.0 for version, one in measured.items()}
    assert len(kept) == min(most, len(rewards))
    assert not kept or min(rewards[one] for one in kept) >= max((rewards[o] for o in rewards.keys() - kept), default=0)


def of_samples(version: int, *rewards: float | None) -> Round:
    there = [one for one in rewards if one is not None]
    counts = {"scored": len(there), "asked": len(rewards)}
    return Round(version, sum(there) / len(there), drawn="d", scores={"reward": rewards}, **counts)


def test_the_best_is_over_shared_samples_of_enough():
    easy, hard = [0.9] * 9, 0.0
    rounds = (of_samples(10, *easy, hard), of_samples(20, *[0.8] * 9, None), of_samples(30, *[1.0] * 5, *[None] * 5))
    state = ControlState(validated=95, rounds=rounds)
    assert worth_keeping(config(), {10, 20, 30}, state) == {10}
    assert worth_keeping(config(**{"checkpoint.keep_best": 3}), {10, 20, 30}, state) == {10, 20}


def test_the_order_does_not_depend_on_what_is_left():
    rounds = [of_samples(10 * n, *[(n * k) % 7 / 7 if (n + k) % 11 else None for k in range(12)]) for n in range(1, 9)]
    there = {one.version for one in rounds}
    order = best_first(rounds_of(config(), there, rounds), rounds)
    for gone in there:
        left = best_first(rounds_of(config(), there - {gone}, rounds), rounds)
        assert left == [one for one in order if one != gone]
