"""Tests how validation rounds are compared when samples have no score, and what is said of these."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_async.control.reasons import OTHER, count, listed, short
from omni_async.control.rounds import NotComparable, Round, compare, first_and_last, ranked
from omni_async.records.read.rounds import line_of, read_round, read_rounds

N = None


def made(version: int, *rewards: float | None, drawn: str = "d", **columns: tuple[float | None, ...]) -> Round:
    """Makes a round of these rewards of its samples, and of these values of its parts."""
    there = [one for one in rewards if one is not None]
    mean = sum(there) / len(there) if there else None
    means = {name: math.fsum(v for v in column if v is not None) / len(there) for name, column in columns.items()}
    counts = {"scored": len(there), "asked": len(rewards), "reasons": {"no face": len(rewards) - len(there)}}
    return Round(version, mean, means, drawn=drawn, scores={"reward": rewards, **columns}, **counts)


def versions(*rounds: Round) -> list[int]:
    return [one.version for one in ranked(rounds)]


def test_rounds_are_compared_over_the_samples_that_both_have_scored() -> None:
    first = made(0, 1.0, 0.0, 2.0, exact=(1.0, 0.0, 1.0))
    last = made(9, 1.5, N, 2.5, exact=(0.0, N, 1.0))
    change = compare(first, last)
    assert change.numbers == {"reward": (1.5, 2.0), "exact": (1.0, 0.5)}
    assert (change.before, change.after, change.samples, change.asked) == (0, 9, 2, 3)
    assert change.over == " over the 2 of 3 samples that both have scored"
    assert compare(first, first).over == "" and compare(first, first).reward == (1.0, 1.0)


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        (made(0, 1.0, N), made(1, N, 1.0), "no sample has a score in both"),
        (made(0, 1.0), made(1, 1.0, drawn="other"), "prompts, noise, sampling or scorers differ"),
        (made(0, N), made(1, 1.0), "no reward"),
        (Round(0, 0.5, scored=2), Round(1, 1.0, scored=1), "2 and 1 samples were scored"),
    ],
)
def test_rounds_that_are_not_comparable(before: Round, after: Round, why: str) -> None:
    with pytest.raises(NotComparable, match=why):
        compare(before, after)


def test_rounds_recorded_before_are_compared_by_their_means() -> None:
    change = compare(Round(0, 0.5, {"exact": 0.1}), Round(1, 0.75, {"exact": 0.2, "new": 1.0}))
    assert change.numbers == {"reward": (0.5, 0.75), "exact": (0.1, 0.2)}
    assert (change.samples, change.over) == (None, "")
    assert versions(Round(0, 0.5), made(1, 0.4, 0.4), Round(2, 0.45)) == [0, 2, 1]
    assert versions(Round(0, 0.5, scored=90), Round(1, 0.9, scored=89)) == [0, 1]


def test_a_round_with_a_higher_mean_over_fewer_samples_is_not_above_one_that_it_does_not_beat() -> None:
    easy = [1.0] * 9
    whole, lucky = made(1, *easy, 0.0), made(2, *[0.99] * 9, N)
    assert lucky.reward is not None and whole.reward is not None and lucky.reward > whole.reward
    assert versions(whole, lucky) == [1, 2]
    assert versions(whole, made(2, *easy, N)) == [2, 1], "of equal ones the newer"


@pytest.mark.parametrize(("missing", "may"), [(0, True), (1, True), (2, False), (10, False)])
def test_a_round_with_less_than_nine_tenths_of_its_samples_scored_cannot_be_the_best(missing: int, may: bool) -> None:
    one = made(3, *[5.0] * (10 - missing), *[N] * missing)
    assert one.may_be_best == may and (versions(made(0, *[1.0] * 10), one)[0] == 3) == may
    assert ("cannot be the best" in one.left_out) == (not may)
    assert bool(one.left_out) == bool(missing)
    assert made(2, 1.0, N).left_out == "1 of 2 samples not scored: no face; it cannot be the best"


def test_prompts_that_changed_make_the_newer_round_the_measure() -> None:
    assert versions(made(1, 0.9, drawn="old"), made(2, 0.1, drawn="new"), made(3, 0.2, drawn="new")) == [3, 2, 1]


_SAMPLES = st.lists(st.one_of(st.none(), *[st.floats(0, 1)] * 12), min_size=6, max_size=6)


@given(st.lists(_SAMPLES, max_size=8))
def test_later_rounds_leave_the_order_of_earlier_ones(found: list[list[float | None]]) -> None:
    rounds = [made(version, *rewards, *[0.5] * 30) for version, rewards in enumerate(found)]
    orders = [versions(*rounds[:number]) for number in range(len(rounds) + 1)]
    for before, after in pairwise(orders):
        assert [one for one in after if one in before] == before
    whole = [one for one in rounds if not one.is_incomplete]
    by_mean = sorted(whole, key=lambda one: (one.reward or 0.0, one.version), reverse=True)
    assert versions(*whole) == [one.version for one in by_mean]


@given(st.lists(_SAMPLES, min_size=2, max_size=2))
def test_the_higher_mean_over_common_samples_is_first(found: list[list[float | None]]) -> None:
    rounds = [made(version, *rewards, *[0.5] * 60) for version, rewards in enumerate(found)]
    before, after = compare(*rounds).reward
    if not math.isclose(before, after, rel_tol=1e-9):
        assert versions(*rounds) == ([1, 0] if after > before else [0, 1])


def test_equal_rewards_that_lack_other_samples_are_equal() -> None:
    """Checks that rounding of sums does not decide: the same policy twice, of which other samples failed."""
    rewards = [0.1 * n for n in range(50)]
    first, second = ([reward if n not in gone else N for n, reward in enumerate(rewards)] for gone in ((3,), (7, 41)))
    assert versions(made(1, *first), made(2, *second)) == [2, 1]
    assert versions(made(1, *second), made(2, *first)) == [2, 1]


def test_first_and_last_are_rounds_with_a_reward() -> None:
    ends = first_and_last([made(4, N), made(2, 1.0), made(0, N), made(1, 0.5)])
    assert ends is not None and [one.version for one in ends] == [1, 2]
    assert first_and_last([made(0, 1.0), made(1, N)]) is None


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("reward failed 1 times: scorer 'f:F': ValueError: no face found (/a b/(c)/f.py:17)", "no face found"),
        ("scorer 'f': KeyError: 'box'", "KeyError: 'box'"),
        ("generation failed 3 times: ValueError: 3608 tokens", "generation failed: ValueError: 3608 tokens"),
        ("zero reward variance", "zero reward variance"),
        ("its scoring was cut off 2 times: reward-0 was lost", "its scoring was cut off 2 times: reward-0 was lost"),
        ("a\x1b[2J\nb", r"a\x1b[2J b"),
        ("", "no reason was given"),
        ("x" * 5000, "x" * 157 + "..."),
    ],
)
def test_reasons_are_short_and_alike_where_they_mean_the_same(reason: str, shown: str) -> None:
    assert short(reason, name_scorer=False) == shown.replace("ValueError: 3608", "3608")
    assert len(short(reason)) <= 160


def test_reasons_are_counted_the_most_frequent_first_and_few_of_them() -> None:
    given_ = {f"reward failed {n} times: scorer 'a': ValueError: no face": 2 for n in (1, 2)}
    given_ |= {f"reason {n}": 1 for n in range(9)}
    found = count(given_)
    assert next(iter(found.items())) == ("no face (scorer 'a')", 4)
    assert len(found) == 6 and found[OTHER] == 5 and sum(found.values()) == 13
    assert listed({"a": 3}) == "a" and listed({"a": 3, "b": 1}) == "a (3), b (1)" and listed({}) == ""


def test_a_round_goes_through_its_line() -> None:
    for one in (made(2, 1.0, N, exact=(1.0, N)), made(3, N)):
        means = {f"validation/{name}": value for name, value in {"reward": one.reward, **one.parts}.items()}
        line = json.loads(json.dumps({"update": one.version, **line_of(one, means, {"not_scored": 1})}))
        assert read_round(line) == one


@pytest.mark.parametrize("value", [None, "text", [], {"a": 1}, -1, 1e308, True, 10**400, [1.0], {"reward": [1.0]}])
@pytest.mark.parametrize("key", ["samples", "asked", "reasons", "drawn", "scores", "validation/reward"])
def test_what_no_run_writes_is_unknown(key: str, value: object) -> None:
    one = made(2, 1.0, N)
    line = {"update": 2, **line_of(one, {"validation/reward": 1.0}, {}), key: value}
    (found,) = read_rounds([line])
    assert found.reward in (1.0, -1.0, None) and found.scores in ({}, one.scores)
    ranked([found, one])
    assert isinstance(found.left_out, str)


def test_of_rounds_recorded_before_the_most_samples_are_those_that_were_asked_for() -> None:
    lines = [{"update": n, "validation/reward": 0.5, "samples": scored} for n, scored in ((0, 2), (1, 2), (2, 1))]
    rounds = read_rounds(lines)
    assert [one.asked for one in rounds] == [2, 2, 2] and versions(*rounds) == [1, 0]
