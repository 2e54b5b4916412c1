"""Tests that reductions are those declared at recording."""

import math
import re
from pathlib import Path

import pytest
import torch

from omni_async.layout import ParallelLayout
from omni_async.training import TrainingError
from omni_async.training.metrics import Metrics


def test_each_metric_is_reduced_as_declared():
    metrics = Metrics(ParallelLayout())
    for part in (torch.tensor([1.0, -5.0]), torch.tensor([2.0])):
        for reduction in ("mean", "max", "absmax", "variance"):
            metrics.record(reduction, part, reduction)
        metrics.record("ess", part, "ess")
    values = torch.tensor([1.0, -5.0, 2.0], dtype=torch.float64)
    w = values.exp()
    expected = {
        "mean": -2 / 3,
        "max": 2.0,
        "absmax": 5.0,
        "variance": float(values.var(correction=0)),
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
def test_rows_are_reduced_per_denoising_step(reduction, expected):
    metrics = Metrics(ParallelLayout())
    metrics.record_by_step("v", torch.tensor([1.0, 10.0]), [0, 2], reduction)
    metrics.record_by_step("v", torch.tensor([3.0, 10.0, 5.0]), [0, 2, 3], reduction)
    assert metrics.reduce(4) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1e4, 0.0], 1 / 2),
        ([-400.0, -500.0, -600.0], 1 / 3),
        ([-1e5, -1e5, -2e5], 2 / 3),
        ([700.0, 700.0 + math.log(3.0)], 16 / 20),
        ([-400.0, -400.0 + math.log(3.0), -800.0], 16 / 30),
    ],
)
def test_the_ess_of_log_ratios_of_any_size_is_that_of_their_differences(values, expected):
    metrics = Metrics(ParallelLayout())
    metrics.record("ess", torch.tensor(values, dtype=torch.float64), "ess")
    metrics.record("beside", torch.tensor([2.0]), "max")
    metrics.record_by_step("ess", torch.tensor([*values, 5.0], dtype=torch.float64), [1] * len(values) + [3], "ess")
    metrics.record_by_step("beside", torch.tensor([3.0, -3.0]), [1, 1], "mean")
    got = metrics.reduce(4)
    assert got == pytest.approx(
        {"ess": expected, "beside": 2.0, "ess/step_01": expected, "ess/step_03": 1.0, "beside/step_01": 0.0}
    )


def test_a_metric_of_an_objective_that_would_hide_one_of_the_runs_is_refused():
    """Holds what is refused to the page that lists the run's metrics."""
    page = (Path(__file__).parents[2] / "docs" / "run-directory.md").read_text(encoding="utf-8")
    table = page.partition("| `update` |")[2].partition("\n\n")[0]
    names = {name for row in table.splitlines() for name in re.findall(r"`([a-z_]+)[`/]", row.split("|")[1])}
    objectives = {"ratio_deviation", "clipped_low", "clipped_high", "clip_fraction", "approx_kl", "kl_ref"}
    assert {"reward", "loss", "ess", "busy"} <= names
    one = torch.ones(2)
    Metrics(ParallelLayout()).record_loss(one, one, dict.fromkeys(objectives, one))
    for name in names - objectives:
        for own in (name, f"{name}/mine"):
            with pytest.raises(TrainingError, match=rf"metrics \['{own}'\] have names of the run's own"):
                Metrics(ParallelLayout()).record_loss(one, one, {own: one})
