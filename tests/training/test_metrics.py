"""Tests how metrics are reduced, and drift, weights and masks of every update."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean, pvariance
from typing import Any

import pytest
import torch

from omni_async.config.layout import ParallelLayout
from omni_async.records.write.metrics import METRICS
from omni_async.training import TrainingError
from omni_async.training.device import sum_of_rows
from omni_async.training.engine import TrainEngine
from omni_async.training.groups import GroupBatch
from omni_async.training.metrics import Metrics
from tests.training import training_world as world


def test_each_metric_is_reduced_as_declared_and_per_denoising_step():
    metrics = Metrics(ParallelLayout())
    for part, steps in ((torch.tensor([1.0, -5.0]), [0, 2]), (torch.tensor([2.0]), [0])):
        for reduction in ("mean", "max", "absmax", "variance"):
            metrics.record(reduction, part, reduction)
        for reduction in ("mean", "variance"):
            metrics.record_by_step(reduction, part, steps, reduction)
        metrics.record("ess", part, "ess")
    values = torch.tensor([1.0, -5.0, 2.0], dtype=torch.float64)
    w = values.exp()
    expected = {"mean": -2 / 3, "max": 2.0, "absmax": 5.0, "variance": float(values.var(correction=0))}
    expected |= {"ess": float(w.mean() ** 2 / w.square().mean())}
    expected |= {"mean/step_00": 1.5, "variance/step_00": 0.25, "mean/step_02": -5.0}  # of one row there is no variance
    assert metrics.reduce(4) == pytest.approx(expected)
    assert metrics.reduce(4) == {}


def test_a_metric_of_samples_is_the_mean_over_samples_however_their_rows_arrive():
    def function(means, numbers):
        return means * numbers + 100 * numbers

    metrics = Metrics(ParallelLayout())
    for values, samples in (([1.0, 2.0], ["a", "b"]), ([3.0], ["a"]), ([4.0, 5.0], ["b", "c"])):
        metrics.record_by_sample("sums", torch.tensor(values), samples, function)
    assert metrics.reduce(4) == {"sums": (4 + 200 + 6 + 200 + 5 + 100) / 3}
    metrics.record_by_sample("sums", torch.ones(1), ["a"], function)
    metrics.clear()
    assert metrics.reduce(4) == {}


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
    by_step = {"ess/step_01": expected, "ess/step_03": 1.0, "beside/step_01": 0.0}
    assert metrics.reduce(4) == pytest.approx({"ess": expected, "beside": 2.0, **by_step})


def test_a_metric_of_an_objective_that_would_hide_one_of_the_runs_is_refused():
    """Holds what is refused to the catalogue of metrics."""
    names = {metric.name.partition("/")[0] for metric in METRICS if metric.source == "run"}
    objectives = {metric.name for metric in METRICS if metric.source == "objective"}
    assert {"reward", "loss", "ess", "busy"} <= names and {"ratio_deviation", "kl_ref"} <= objectives
    one = torch.ones(2)
    Metrics(ParallelLayout()).record_loss(one, one, dict.fromkeys(objectives, one))
    for name in names:
        for own in (name, f"{name}/mine"):
            with pytest.raises(TrainingError, match=rf"metrics \['{own}'\] have names of the run's own"):
                Metrics(ParallelLayout()).record_loss(one, one, {own: one})


WORLD, STEPS = 4, 3
ROWS = (1, 3, 9)  # ranks without any, and ranks with more than others
SEQUENCES = (1, 2, 4)


def reduced(layout: ParallelLayout, number: int) -> dict[str, float]:
    """Reduces `number` rows, of which every rank records those that it is dealt."""
    values = 500 * torch.randn(number, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
    mine = list(layout.dealt(number))
    metrics = Metrics(layout)
    if mine:
        own, steps = values[mine], [row % STEPS for row in mine]
        for reduction in ("mean", "max", "absmax", "variance", "ess"):
            metrics.record(reduction, own, reduction)
        for reduction in ("mean", "variance", "ess"):
            metrics.record_by_step(reduction, own, steps, reduction)
    if 0 in mine:  # only where the first row is
        metrics.record("first", own[:1])
    if mine:
        metrics.record_by_sample("samples", own, mine, lambda means, numbers: means + numbers)
    return metrics.reduce(STEPS)


def work(rank: int) -> tuple[dict[tuple[int, int], dict[str, float]], dict[int, list[float]]]:
    layouts = {sequence: ParallelLayout(rank, WORLD, sequence) for sequence in SEQUENCES}
    found = {(sequence, rows): reduced(layout, rows) for sequence, layout in layouts.items() for rows in ROWS}
    own = torch.tensor([1.0, 2.0], dtype=torch.float64)
    sums = {sequence: sum_of_rows(layout, own).tolist() for sequence, layout in layouts.items()}
    assert own.tolist() == [1.0, 2.0]
    return found, sums


@pytest.mark.thorough
def test_rows_count_once_however_they_are_dealt():
    for found, sums in world.on_ranks(WORLD, work):
        for (sequence, rows), metrics in found.items():
            expected = reduced(ParallelLayout(), rows)
            assert {"mean", "variance", "ess", "first", "samples", "mean/step_00"} <= expected.keys()
            assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-12), (sequence, rows)
        groups = {sequence: WORLD / sequence for sequence in SEQUENCES}
        assert sums == {sequence: [number, 2.0 * number] for sequence, number in groups.items()}


def drifted(**changes: Any) -> tuple[TrainEngine, list[GroupBatch], list[world.Step]]:
    """Returns an engine, stale groups of two windows, and their steps under the engine's weights."""
    engine = world.engine(**{"size": 3, **changes})
    groups = [world.group_of(engine, seed, range(seed, seed + 2), staleness=2) for seed in (0, 1)]
    world.nudge(engine, 0.05)
    return engine, groups, [s for g in groups for s in world.steps_of(world.model_of(engine), engine.config, g)]


def ess(values: Iterable[float]) -> float:
    w = [math.exp(v) for v in values]
    return sum(w) ** 2 / (len(w) * sum(x * x for x in w))


def batched(values: list[float], size: int) -> Iterable[list[float]]:
    return (values[first : first + size] for first in range(0, len(values), size))


def by_step(steps: list[world.Step]) -> dict[int, list[world.Step]]:
    """Returns the rows of each denoising step: group 0 has steps 0 and 1, group 1 steps 1 and 2."""
    found: dict[int, list[world.Step]] = {}
    for i, s in enumerate(steps):
        found.setdefault(s.position + i // 8, []).append(s)
    return found


@pytest.mark.parametrize("mode", ["bypass", "none", "decoupled"])
def test_drift_of_all_rows_and_of_each_denoising_step(mode):
    engine, groups, steps = drifted(correction={"mode": mode})
    metrics = world.step_on(engine, *groups)
    nats = [s.nats for s in steps]
    expected = {
        "log_ratio_nats/mean": fmean(nats),
        "log_ratio_nats/absmax": max(map(abs, nats)),
        "log_ratio_nats/variance": pvariance(nats),
        "ess": ess(nats),
        "k3_nats": fmean(math.exp(x) - 1 - x for x in nats),
        "chi2": fmean(math.exp(2 * x) - 1 for x in nats),
        "chi2/sample": fmean(math.exp(2 * (a + b)) - 1 for a, b in batched(nats, 2)),
        "perplexity_ratio": fmean(math.exp(-(a + b) / 2) for a, b in batched(nats, 2)),
        "kappa_nats": fmean(s.kappa for s in steps),
        "row_staleness/mean": 2,
        "row_staleness/max": 2,
        "fresh_fraction": 0,
        "engine_mismatch_nats": 0,
    }
    for i, rows in by_step(steps).items():
        expected[f"log_ratio_nats/variance/step_{i:02d}"] = pvariance([s.nats for s in rows])
        expected[f"ess/step_{i:02d}"] = ess(s.nats for s in rows)
        expected[f"kappa_nats/step_{i:02d}"] = fmean(s.kappa for s in rows)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=2e-5)
    assert {name for name in metrics if "step_" in name} == {name for name in expected if "step_" in name}
    assert not {name for name in metrics if name.startswith(("weight", "masked", "statistic"))}
    assert ("drift_clipped" in metrics) == (mode == "bypass")
    assert mode != "bypass" or metrics["drift_clipped"] == metrics["clip_fraction"]


def test_weights_and_masks_of_all_rows_and_of_each_denoising_step():
    correction = {"mode": "decoupled", "weights": "importance", "cap": 1.2, "kappa_nats": 0.25, "k1": (0.8, 1.5)}
    engine, groups, steps = drifted(correction=correction)
    metrics = world.step_on(engine, *groups)

    def weight(s: world.Step) -> float:
        return min(math.exp(s.nats), 1.2) if s.kappa <= 0.25 and 0.8 <= math.exp(s.nats) <= 1.5 else 0.0

    all_weights = [weight(s) for s in steps]
    expected = {
        "weight/mean": fmean(all_weights),
        "weight/max": max(all_weights),
        "weight/variance": pvariance(all_weights),
        "masked": fmean(w == 0 for w in all_weights),
        "masked/kappa_nats": fmean(s.kappa > 0.25 for s in steps),
        "masked/k1": fmean(not 0.8 <= math.exp(s.nats) <= 1.5 for s in steps),
        "statistic/kappa_nats/mean": fmean(s.kappa for s in steps),
        "statistic/kappa_nats/max": max(s.kappa for s in steps),
        "statistic/k1/mean": fmean(math.exp(abs(s.nats)) for s in steps),
        "statistic/k1/max": max(math.exp(abs(s.nats)) for s in steps),
    }
    assert 0 < expected["masked/kappa_nats"] < expected["masked"] < 1
    for i, rows in by_step(steps).items():
        expected[f"weight/mean/step_{i:02d}"] = fmean(map(weight, rows))
        expected[f"masked/step_{i:02d}"] = fmean(weight(s) == 0 for s in rows)
    got = {name: value for name, value in metrics.items() if name.startswith(("weight", "masked", "statistic"))}
    assert got == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("mode", ["bypass", "none", "decoupled", "interpolated"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_fresh_samples_tell_whether_engine_and_trainer_run_the_same_model(mode, recomputed):
    for off, nats in ((0.0, 0.0), (0.1, 2.4)):  # 24 latent elements
        engine = world.engine(correction={"mode": mode}, size=3)
        group = world.group_of(engine)
        group.trajectories[2]["log_probs"][1] -= off
        if recomputed:
            engine.recompute_proximal(group)
        metrics = world.step_on(engine, group)
        assert metrics["engine_mismatch_nats"] == pytest.approx(nats, rel=1e-3, abs=1e-4)
        assert metrics["fresh_fraction"] == 1


def test_neither_a_stale_step_nor_a_later_one_of_an_update_can_tell_a_mismatch():
    engine = world.engine(steps_per_update=2)
    group = world.group_of(engine)
    group.trajectories[2]["log_probs"][1] -= 0.1
    metrics = world.step_on(engine, replace(group, staleness=[[0, 0], [0, 0], [0, 1], [0, 0]]))
    assert metrics["engine_mismatch_nats"] < 1e-4
    assert metrics["log_ratio_nats/absmax"] == pytest.approx(2.4, rel=1e-3)
    assert (metrics["fresh_fraction"], metrics["row_staleness/mean"], metrics["row_staleness/max"]) == (7 / 8, 1 / 8, 1)
    found = [world.update(engine, seed) for seed in range(3)]
    for name in ("engine_mismatch_nats", "drift_clipped"):
        assert [name in metrics for metrics in found] == [False, True, False]
