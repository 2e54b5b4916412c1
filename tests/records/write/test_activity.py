"""Tests the shares of time that roles were busy and waited, and that their sums stay right in bounded memory."""

from __future__ import annotations

import math
import random

import pytest

from omni_async.records.write import activity as activity_module
from omni_async.records.write.activity import Activity, busy_fractions
from omni_async.types import Span


def test_fractions_are_unions_per_actor_averaged_over_the_role() -> None:
    first = (("generate", 0, 6), ("generate", 2, 8), ("starved", 7, 10))
    second = (("generate", -5, 4), ("backpressured", 4, 9))
    of_actors = {"rollout-0": first, "rollout-1": second, "trainer": (("train", 5, 10), ("starved", 0, 5))}
    spans = [Span(actor, *each) for actor, times in of_actors.items() for each in times]
    activity = Activity((0, math.inf), spans)
    fractions = busy_fractions(activity, 10)
    assert fractions["rollout"] == pytest.approx({"busy": 0.6, "backpressured": 0.25, "starved": 0.1})
    assert fractions["trainer"] == pytest.approx({"busy": 0.5, "backpressured": 0.0, "starved": 0.5})
    assert activity.overlap(10) == pytest.approx(0.3)
    assert activity.overlap(0) == 0.0


def test_a_replacement_is_the_same_actor_an_outage_is_no_work_and_two_actors_of_a_role_are_no_overlap() -> None:
    spans = [Span("reward-0", "score", 0, 4), Span("reward-0.2", "score", 6, 10), Span("reward-1", "outage", 0, 10)]
    spans.append(Span("publisher", "publish", 0, 10))
    shares = {"busy": 0.4, "backpressured": 0.0, "starved": 0.0}
    activity = Activity((0, math.inf), spans)
    assert busy_fractions(activity, 10)["reward"] == pytest.approx(shares)
    assert Activity((0, math.inf), [*spans, Span("reward-1", "score", 0, 10)]).overlap(10) == 0.0
    assert Activity((0, math.inf), [*spans, Span("trainer", "train", 0, 10)]).overlap(10) == pytest.approx(0.8)


def test_sums_of_old_stretches_are_those_of_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    starts = sorted(rng.uniform(0, 900) for _ in range(3000))
    kinds = {"rollout-0": ("generate", "starved"), "reward-0": ("score", "backpressured"), "trainer": ("train",)}
    spans = [Span(actor := rng.choice([*kinds]), rng.choice(kinds[actor]), at, at + rng.random()) for at in starts]
    edges = [0.0, 300.0, 301.0, 950.0]
    whole = Activity(edges, spans)
    monkeypatch.setattr(activity_module, "_MOST", 200)
    summed = Activity(edges, sorted(spans, key=lambda span: span.end))
    held = sum(len(own) // 2 for states in summed._stretches.values() for own in states.values())
    assert held <= 200
    assert summed.overlap(950.0) == pytest.approx(whole.overlap(950.0))
    for role, shares in whole.shares(950.0).items():
        assert summed.shares(950.0)[role] == pytest.approx(shares)
