"""Reductions are those declared at recording."""

from __future__ import annotations

import math

import pytest
import torch

from omni_async.training.metrics import Metrics


def test_each_metric_is_reduced_as_declared() -> None:
    metrics = Metrics()
    for part in (torch.tensor([1.0, -5.0]), torch.tensor([2.0])):
        for reduction in ("mean", "max", "absmax", "variance", "last"):
            metrics.record(reduction, part, reduction)
        metrics.record("ess", part, "ess")
    values = torch.tensor([1.0, -5.0, 2.0], dtype=torch.float64)
    w = values.exp()
    expected = {
        "mean": -2 / 3,
        "max": 2.0,
        "absmax": 5.0,
        "variance": float(values.var(correction=0)),
        "last": 2.0,
        "ess": float(w.mean() ** 2 / w.square().mean()),
    }
    assert metrics.reduce(4) == pytest.approx(expected)
    assert metrics.reduce(4) == {}


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("variance", {"v/step_00": 1.0, "v/step_02": 0.0}),  # of a single row there is none
        ("mean", {"v/step_00": 2.0, "v/step_02": 10.0, "v/step_03": 5.0}),
        ("ess", {"v/step_00": (1 + math.e**2) ** 2 / (2 * (1 + math.e**4)), "v/step_02": 1.0, "v/step_03": 1.0}),
    ],
)
def test_rows_are_reduced_per_denoising_step(reduction: str, expected: dict[str, float]) -> None:
    metrics = Metrics()
    metrics.record_by_step("v", torch.tensor([1.0, 10.0]), [0, 2], reduction)
    metrics.record_by_step("v", torch.tensor([3.0, 10.0, 5.0]), [0, 2, 3], reduction)
    assert metrics.reduce(4) == pytest.approx(expected)


def test_one_name_may_be_reduced_over_all_rows_and_per_step() -> None:
    metrics = Metrics()
    metrics.record("v", torch.tensor([1.0, 2.0, 6.0]))
    metrics.record_by_step("v", torch.tensor([1.0, 2.0, 6.0]), [1, 1, 0], "mean")
    assert metrics.reduce(2) == {"v": 3.0, "v/step_00": 6.0, "v/step_01": 1.5}


def test_extreme_log_ratios_do_not_overflow_the_ess() -> None:
    metrics = Metrics()
    metrics.record("ess", torch.tensor([1e4, 0.0]), "ess")
    assert math.isclose(metrics.reduce(1)["ess"], 0.5)
