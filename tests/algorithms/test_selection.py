"""Tests the pair of a group: its best and its worst sample."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_async.algorithms.selection import best_and_worst

REWARDS = st.lists(
    st.floats(allow_nan=False, allow_infinity=False) | st.integers(-2, 2).map(float), min_size=2, max_size=8
)


@pytest.mark.parametrize(
    ("rewards", "pair"),
    [
        ([0.1, 0.9, 0.4], (1, 0)),
        ([3.0, 2.0], (0, 1)),
        ([2.0, 3.0], (1, 0)),
        ([1.0, 2.0, 1.0, 2.0], (1, 0)),
        ([5.0, 5.0, 5.0], (0, 1)),
        ([5.0, 1.0, 5.0], (0, 1)),
        ([-1.0, -1.0, -2.0], (0, 2)),
    ],
)
def test_the_first_of_the_best_and_the_first_of_the_worst_are_taken(rewards, pair):
    assert best_and_worst(rewards) == pair


@given(REWARDS)
def test_no_reward_lies_outside_and_the_two_samples_differ(rewards):
    best, worst = best_and_worst(rewards)
    assert best != worst
    assert rewards[best] == max(rewards)
    assert rewards[worst] == min(rewards)


@pytest.mark.parametrize("rewards", [[], [1.0]])
def test_one_sample_makes_no_pair(rewards):
    with pytest.raises(ValueError, match=f"a preference pair needs at least 2 samples of a prompt, got {len(rewards)}"):
        best_and_worst(rewards)
