"""Tests that a vanished gradient is reported once, with its cause as far as the numbers show it."""

from __future__ import annotations

import pytest

from omni_async.tracking.vanishing import GradientWatch


def warnings(norms: list[float], **metrics: float) -> list[tuple[int, str]]:
    watch = GradientWatch()
    said = [
        (version, watch.take(version, {"grad_norm": norm, **metrics})) for version, norm in enumerate(norms, start=1)
    ]
    return [(version, text) for version, text in said if text is not None]


def test_a_gradient_that_most_of_the_newest_updates_lack_is_reported() -> None:
    [(version, text)] = warnings([80, 70, 90, 75, 60, 40, 0.01, 0.02, 0.0, 0.01], accuracy=1.0, margin=24.7)
    assert version == 9, "the median of five"
    assert (
        text
        == "warning: update 9: the gradient has vanished (median norm of the last 5 updates 0.02, where it began at"
        " 75): the preferences are satisfied (accuracy 1.00, margin 24.7), so these pairs teach nothing more; stop"
        " here, give other pairs, or lower algorithm.dpo.beta"
    )


def test_a_batch_without_a_gradient_now_and_then_is_not_reported() -> None:
    assert warnings([80, 70, 90, 75, 60, 0.0, 50, 0.0, 60, 40, 0.0, 70, 0.0, 65]) == []
    assert warnings([3e-5] * 20) == [], "small from the start: that is the model's scale"


def test_a_gradient_that_came_back_and_vanished_again_is_reported_again() -> None:
    assert [version for version, _ in warnings([1.0] * 5 + [0.0] * 10 + [1.0] * 5 + [0.0] * 5)] == [8, 23]


def test_a_run_that_never_had_a_gradient_is_reported() -> None:
    [(version, text)] = warnings([0.0] * 8)
    assert version == 5 and "updates 0)" in text


@pytest.mark.parametrize(
    ("metrics", "cause"),
    [
        ({"clip_fraction": 0.97}, "97% of the rows are outside the clip range"),
        ({"masked": 0.9}, "masks 90% of the rows"),
        ({}, "hardly differ"),
    ],
)
def test_the_cause_follows_from_the_numbers(metrics: dict[str, float], cause: str) -> None:
    assert cause in warnings([1.0] * 5 + [0.0] * 5, **metrics)[0][1]


def test_metrics_without_a_gradient_say_nothing() -> None:
    assert GradientWatch().take(1, {"loss": 0.0}) is None
