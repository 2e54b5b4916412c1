"""Tests the Pareto front: nothing on it is slower and no fresher than something else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from omni_async.tune.search import Point
from omni_async.tune.tuning import front
from tests.tune.tune_world import PROFILE, job, simulate_by_law

ANY = simulate_by_law(job(), PROFILE, updates=1, seed=0, bundle=1)


def point(images_per_s, mean, largest):
    return Point(
        {"staleness.max_updates": largest}, images_per_s, replace(ANY, staleness_mean=mean, staleness_max=largest)
    )


def test_slower_points_that_are_no_fresher_are_left_out():
    sync, half, good, stale, slow = (
        point(1.0, 0.0, 0),
        point(1.5, 0.5, 1),
        point(2.0, 1.0, 1),
        point(2.0, 3.0, 4),
        point(1.2, 1.0, 2),
    )
    assert front([slow, stale, good, half, sync], good) == [sync, half, good]


def test_either_mean_or_maximum_makes_a_point_fresher():
    low_mean, low_maximum = point(2.0, 0.5, 4), point(2.0, 1.5, 2)
    assert front([low_mean, low_maximum], low_mean) == [low_mean, low_maximum]


def test_a_gain_within_rounding_is_not_worth_a_row():
    assert front([point(1.0, 0.0, 0), point(1.001, 1.0, 1)], point(1.0, 0.0, 0)) == [point(1.0, 0.0, 0)]


def test_the_chosen_point_is_on_it_once_even_if_another_is_a_little_faster():
    chosen, faster = point(2.0, 1.0, 1), point(2.004, 1.0, 1)
    assert front([point(1.0, 0.0, 0), chosen, faster], chosen) == [point(1.0, 0.0, 0), chosen]


@pytest.mark.parametrize("chosen", [0, 17, 39])
def test_a_long_front_is_thinned_but_keeps_its_ends_and_the_chosen_point(chosen):
    points = [point(1.0 + 0.1 * i, i / 10, 4) for i in range(40)]
    shown = front(points, points[chosen])
    assert len(shown) == 12
    assert points[chosen] in shown
    assert shown[-1] == points[-1]


@given(st.lists(st.builds(point, st.floats(1, 100), st.floats(0, 8), st.integers(0, 8)), min_size=1, max_size=30))
def test_no_row_is_beaten_by_another(points):
    chosen = max(points, key=lambda p: p.images_per_s)
    rows = [row for row in front(points, chosen) if row != chosen]
    for row in rows:
        for other in rows:
            fresher = (
                other.simulated.staleness_mean <= row.simulated.staleness_mean
                and other.simulated.staleness_max <= row.simulated.staleness_max
            )
            assert other is row or not (fresher and other.images_per_s > row.images_per_s)
