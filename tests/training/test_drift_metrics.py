"""Tests the logged metrics of drift, weights and masks of every update, against the definitions; and the alarm for
engines that compute something else."""

import math
from collections.abc import Iterable
from dataclasses import replace
from statistics import fmean, pvariance
from typing import Any

import pytest

from omni_async.training.engine import TrainEngine
from omni_async.training.groups import GroupBatch
from tests.fakes import TinyPolicy, tiny_group
from tests.training.engines import make_config, nudge, started
from tests.training.plain import Step, model_of, steps_of


def drifted(**changes: Any) -> tuple[TrainEngine, list[GroupBatch], list[Step]]:
    """Returns an engine, stale groups of two windows, and their steps under the engine's weights."""
    engine = started(make_config(**{"trainer.micro_batch_size": 3, **changes}))
    groups = [tiny_group(TinyPolicy(), engine.config, seed, range(seed, seed + 2), staleness=2) for seed in (0, 1)]
    nudge(engine, size=0.05)
    model = model_of(engine)
    return engine, groups, [s for g in groups for s in steps_of(model, engine.config, g)]


def update(engine: TrainEngine, groups: list[GroupBatch]) -> dict[str, float]:
    for group in groups:
        engine.accumulate(group, 1 / 16)
    return engine.step()


def ess(values: Iterable[float]) -> float:
    w = [math.exp(v) for v in values]
    return sum(w) ** 2 / (len(w) * sum(x * x for x in w))


def by_step(steps: list[Step]) -> dict[int, list[Step]]:
    """Returns the rows of each denoising step: group 0 has steps 0 and 1, group 1 steps 1 and 2."""
    found: dict[int, list[Step]] = {}
    for i, s in enumerate(steps):
        found.setdefault(s.position + i // 8, []).append(s)
    return found


@pytest.mark.parametrize("mode", ["bypass", "none", "decoupled"])
def test_drift_of_all_rows_and_of_each_denoising_step(mode):
    engine, groups, steps = drifted(**{"algorithm.correction": {"mode": mode}})
    metrics = update(engine, groups)
    nats = [s.nats for s in steps]
    expected = {
        "log_ratio_nats/mean": fmean(nats),
        "log_ratio_nats/absmax": max(map(abs, nats)),
        "log_ratio_nats/variance": pvariance(nats),
        "ess": ess(nats),
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
    assert not {name for name in metrics if name.startswith(("weight", "masked"))}


def test_weights_and_masks_of_all_rows_and_of_each_denoising_step():
    correction = {"mode": "decoupled", "weights": "importance", "cap": 1.2, "kappa_nats": 0.25, "k1": (0.8, 1.5)}
    engine, groups, steps = drifted(**{"algorithm.correction": correction})
    metrics = update(engine, groups)

    def weight(s: Step) -> float:
        return min(math.exp(s.nats), 1.2) if s.kappa <= 0.25 and 0.8 <= math.exp(s.nats) <= 1.5 else 0.0

    all_weights = [weight(s) for s in steps]
    expected = {
        "weight/mean": fmean(all_weights),
        "weight/max": max(all_weights),
        "weight/variance": pvariance(all_weights),
        "masked": fmean(w == 0 for w in all_weights),
        "masked/kappa_nats": fmean(s.kappa > 0.25 for s in steps),
        "masked/k1": fmean(not 0.8 <= math.exp(s.nats) <= 1.5 for s in steps),
    }
    assert 0 < expected["masked/kappa_nats"] < expected["masked"] < 1
    for i, rows in by_step(steps).items():
        expected[f"weight/mean/step_{i:02d}"] = fmean(map(weight, rows))
        expected[f"masked/step_{i:02d}"] = fmean(weight(s) == 0 for s in rows)
    got = {name: value for name, value in metrics.items() if name.startswith(("weight", "masked"))}
    assert got == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_without_means_there_is_no_kappa():
    engine, groups, _ = drifted()
    for t in groups[0].trajectories:
        del t["means"]
    assert not {name for name in update(engine, groups[:1]) if name.startswith("kappa")}


def test_log_ratios_of_unnormalised_kinds_are_in_nats_too():
    """Uses cps, whose log-probs are -<(x' - mean)^2>; the log-ratio of the sample is D / (2 scale^2) times their
    difference."""
    engine = started(make_config(**{"rollout.sde": {"kind": "cps", "noise_level": 0.8}}))
    group = tiny_group(TinyPolicy(), engine.config, 0, range(1, 2))
    for t in group.trajectories:
        t["log_probs"] = t["log_probs"] - 0.01
    scale = group.trajectories[0]["sigmas"][2].item() * math.sin(0.4 * math.pi)
    engine.accumulate(group, 1.0)
    assert engine.step()["log_ratio_nats/mean"] == pytest.approx(0.01 * 24 / (2 * scale**2), rel=1e-4)


# ---- engine mismatch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["bypass", "none", "decoupled", "interpolated"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_fresh_samples_tell_whether_engine_and_trainer_run_the_same_model(mode, recomputed):
    engine = started(make_config(**{"algorithm.correction": {"mode": mode}, "trainer.micro_batch_size": 3}))
    group = tiny_group(TinyPolicy(), engine.config)
    if recomputed:
        engine.recompute_proximal(group)
    engine.accumulate(group, 1 / 8)
    metrics = engine.step()
    assert metrics["engine_mismatch_nats"] < 1e-4
    assert metrics["fresh_fraction"] == 1

    engine, group = started(engine.config), tiny_group(TinyPolicy(), engine.config)
    group.trajectories[2]["log_probs"][1] -= 0.1  # 24 latent elements
    if recomputed:
        engine.recompute_proximal(group)
    engine.accumulate(group, 1 / 8)
    assert engine.step()["engine_mismatch_nats"] == pytest.approx(2.4, rel=1e-3)


def test_a_stale_step_is_no_mismatch():
    engine = started(make_config())
    group = tiny_group(TinyPolicy(), engine.config)
    group.trajectories[2]["log_probs"][1] -= 0.1
    engine.accumulate(replace(group, staleness=[[0, 0], [0, 0], [0, 1], [0, 0]]), 1 / 8)
    metrics = engine.step()
    assert metrics["engine_mismatch_nats"] < 1e-4
    assert metrics["log_ratio_nats/absmax"] == pytest.approx(2.4, rel=1e-3)
    assert (metrics["fresh_fraction"], metrics["row_staleness/mean"], metrics["row_staleness/max"]) == (7 / 8, 1 / 8, 1)


def test_only_the_first_step_of_an_update_can_tell_a_mismatch():
    engine = started(make_config(**{"trainer.steps_per_update": 2}))
    alarms = []
    for seed in range(4):
        engine.accumulate(tiny_group(TinyPolicy(), engine.config, seed), 1 / 8)
        alarms.append("engine_mismatch_nats" in engine.step())
    assert alarms == [True, False, True, False]
