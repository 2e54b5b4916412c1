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


def test_variance_is_kept_per_denoising_step() -> None:
    metrics = Metrics()
    metrics.record_by_step("v", torch.tensor([1.0, 10.0]), [0, 2])
    metrics.record_by_step("v", torch.tensor([3.0, 10.0, 5.0]), [0, 2, 3])
    assert metrics.reduce(4) == {"v/step_00": 1.0, "v/step_02": 0.0}


def test_extreme_log_ratios_do_not_overflow_the_ess() -> None:
    metrics = Metrics()
    metrics.record("ess", torch.tensor([1e4, 0.0]), "ess")
    assert math.isclose(metrics.reduce(1)["ess"], 0.5)
