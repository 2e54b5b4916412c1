"""Tests where a step's seconds go: every moment of the trainer in one category, and speed-ups in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_async.bench.comparison import CATEGORIES, differences, in_words
from omni_async.bench.measure import attribute
from omni_async.types import Span
from tests.bench import overlap_world as world

_ACTORS = st.sampled_from(["trainer", "rollout-0", "rollout-1", "rollout-2", "reward-0", "publisher"])
_KINDS = st.sampled_from(
    [
        "train",
        "proximal",
        "export",
        "checkpoint",
        "generate",
        "score",
        "publish",
        "stage",
        "swap",
        "switch",
        "starved",
        "backpressured",
    ]
)
SPANS = st.lists(
    st.builds(
        lambda a, k, s, d: Span(a, k, float(s), float(s + d)), _ACTORS, _KINDS, st.integers(0, 40), st.integers(0, 20)
    ),
    max_size=20,
)


def span(actor: str, kind: str, start: float, end: float) -> Span:
    return Span(actor, kind, start, end)


def test_a_synchronous_update_is_taken_apart_exactly():
    spans, finished = world.sync_spans(6)
    found = attribute(spans, finished[2], finished[5], engines=2)
    assert {name: seconds / 3 for name, seconds in found.items()} == pytest.approx(
        {
            "training": world.TRAINING,
            "recompute": world.RECOMPUTE,
            "export": world.EXPORT,
            "generation": world.GENERATION,
            "tail": world.TAIL,
            "reward": world.REWARD,
            "switch": 0.0,
            "weights": world.PUBLISH,
            "idle": world.CONTROL,
        },
        abs=1e-5,
    )


@given(SPANS, st.integers(0, 30), st.integers(1, 30), st.integers(1, 3))
def test_the_categories_sum_to_the_time_whatever_the_spans_are(spans, start, seconds, engines):
    found = attribute(spans, start, start + seconds, engines)
    assert list(found) == list(CATEGORIES)
    assert sum(found.values()) == pytest.approx(seconds)
    assert all(value >= 0 for value in found.values())


@given(SPANS, st.integers(0, 30), st.integers(1, 30))
def test_every_unit_of_time_belongs_to_the_first_category_that_holds_in_it(spans, start, seconds):
    def under_way(kind: str, second: int, of: str = "") -> set[str]:
        return {s.actor for s in spans if s.kind == kind and s.actor.startswith(of) and s.start <= second < s.end}

    expected = dict.fromkeys(CATEGORIES, 0)
    for second in range(start, start + seconds):
        engines = under_way("generate", second)
        tests = {
            "training": under_way("train", second, "trainer"),
            "recompute": under_way("proximal", second, "trainer"),
            "export": under_way("export", second, "trainer"),
            "generation": len(engines) >= 3,
            "tail": engines,
            "switch": under_way("switch", second),
            "reward": under_way("score", second),
            "weights": under_way("publish", second) | under_way("stage", second) | under_way("swap", second),
            "idle": True,
        }
        expected[next(name for name, holds in tests.items() if holds)] += 1
    assert attribute(spans, start, start + seconds, engines=3) == pytest.approx(expected)


def test_an_engine_that_never_worked_makes_generation_a_tail():
    spans = [span("rollout-0", "generate", 0, 4)]
    assert attribute(spans, 0, 5, engines=1)["generation"] == 4
    assert attribute(spans, 0, 5, engines=2) | {"generation": 0, "tail": 4, "idle": 1} == attribute(
        spans, 0, 5, engines=2
    )


def test_a_device_that_switches_roles_inside_a_score_is_not_scoring():
    spans = [span("reward-0", "score", 0, 5), span("reward-0", "switch", 0, 2)]
    found = attribute(spans, 0, 5, engines=1)
    assert (found["switch"], found["reward"]) == (2, 3)


def seconds(**given: float) -> dict[str, float]:
    return {**dict.fromkeys(CATEGORIES, 0.0), **given}


def test_shares_of_a_speed_up_sum_to_one_and_name_what_grew():
    before = seconds(training=4.0, generation=3.0, reward=2.0, weights=1.0)
    after = seconds(training=4.5, reward=0.5)
    shares = differences(before, after)
    assert shares == pytest.approx(seconds(training=-0.1, generation=0.6, reward=0.3, weights=0.2))
    assert sum(shares.values()) == pytest.approx(1)
    assert (
        in_words(2.0, "sync", before, after)
        == "2.00x over sync: generation overlapped 60 %, reward wait 30 %, weight-sync drain 20 %, training -10 %"
    )


def test_a_slower_arm_says_what_it_loses_by():
    before, after = seconds(training=4.0), seconds(training=4.0, tail=1.0)
    assert in_words(0.8, "sync", before, after) == "0.80x over sync; of what it loses: tail 100 %"


def test_a_difference_that_is_next_to_nothing_is_not_taken_apart():
    assert in_words(1.0, "sync", seconds(training=4.0, idle=0.03), seconds(training=4.0)) == "1.00x over sync"


def test_equal_arms_have_nothing_to_attribute():
    same = seconds(training=4.0)
    assert differences(same, same) == {}
    assert in_words(1.0, "sync", same, same) == "1.00x over sync"
