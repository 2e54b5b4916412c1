"""Tests what is recorded of engine and trainer under the same weights, and what follows for the ratio."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from omni_async.algorithms.mismatch import CLIPPED_AT_MOST, HONEST_ERROR
from omni_async.config.layout import ParallelLayout
from omni_async.diffusion.components import compute_velocity
from omni_async.training.metrics import Metrics
from omni_async.training.mismatch import Rows, record_mismatch, velocity_errors
from omni_async.types import SdeWindow
from tests.support.amplifier import Amplifier
from tests.support.places import ROOT
from tests.training import drawn
from tests.training import training_world as world

NARROW = {"clip_range": 0.002}
GUARD = {"name": "grpo_guard", "algorithm.guard": {"scale": "sample"}, "clip_range": 1e-3}


def rows_of(error: float, elements: int, number: int = 4000) -> Rows:
    """Returns rows whose log-ratios are those of a relative velocity error, at f from 0.3 to 1.3 sqrt(D)."""
    generator = torch.Generator().manual_seed(1)
    velocity = 2 * torch.randn(number, 256, generator=generator)
    f = (0.3 + torch.rand(number, generator=generator, dtype=torch.float64)) * elements**0.5
    std = f * error * velocity.square().mean(1).sqrt()
    nats = std * torch.randn(number, generator=generator, dtype=torch.float64) - std.square() / 2
    return Rows(nats, f, velocity, elements, [row % 3 for row in range(number)], list(range(0, number, 2)))


@pytest.mark.parametrize("error", [1e-6, 1e-3, 5e-3, 0.03, 0.3])
def test_the_velocity_error_is_found_in_the_log_ratios_whatever_the_number_of_elements(error: float) -> None:
    for elements in (256, 65_536, 786_432):
        found = velocity_errors(rows_of(error, elements)).square().mean().sqrt().item()
        assert 0.88 * error < found < 1.05 * error


def test_bias_and_spread_are_those_of_the_fresh_rows_by_step() -> None:
    metrics, rows = Metrics(ParallelLayout()), rows_of(0.02, 4096)
    clipped = (rows.nats.abs() > 0.5).double()
    record_mismatch(metrics, rows, clipped)
    found, fresh = metrics.reduce(3), rows.nats[::2]
    assert found["engine_mismatch_nats/mean"] == pytest.approx(fresh.mean().item())
    assert found["engine_mismatch_nats/variance"] == pytest.approx(fresh.var(correction=0).item())
    of_step = fresh[[row // 2 for row in rows.fresh if row % 3 == 1]]
    assert found["engine_mismatch_nats/mean/step_01"] == pytest.approx(of_step.mean().item())
    assert found["engine_mismatch_nats/variance/step_01"] == pytest.approx(of_step.var(correction=0).item())
    assert found["engine_mismatch_clipped"] == pytest.approx(clipped[::2].mean().item())
    assert found["engine_mismatch_nats"] == fresh.abs().max() and found["fresh_fraction"] == 0.5
    record_mismatch(metrics, replace(rows, fresh=[]), clipped)
    assert metrics.reduce(3) == {"engine_mismatch": 0, "engine_mismatch_nats": 0, "fresh_fraction": 0}


@pytest.mark.parametrize("size", [1, 3, 100])
def test_an_engine_off_by_some_velocity_is_measured_in_an_update(size: int) -> None:
    """Takes log-probs from other weights than the trainer's, on samples that count as fresh."""
    engine, groups = world.moved(by=0.02, size=size, **NARROW)
    groups = [replace(group, staleness=[[0, 0]] * 4) for group in groups]
    steps = [s for group in groups for s in world.steps_of(world.model_of(engine), engine.config, group)]
    metrics = world.step_on(engine, *groups)
    nats = torch.tensor([s.nats for s in steps], dtype=torch.float64)
    assert metrics["engine_mismatch_nats/mean"] == pytest.approx(nats.mean().item(), abs=2e-5)
    assert metrics["engine_mismatch_clipped"] == metrics["clip_fraction"] > 0
    kappa = torch.tensor([s.kappa for s in steps], dtype=torch.float64)  # (f e)^2 / 2, without the luck of L
    assert 0.3 < metrics["engine_mismatch_nats/variance"] / (2 * kappa.mean().item()) < 3


@pytest.mark.parametrize("changes", [NARROW, {**NARROW, "steps_per_update": 2}, GUARD])
def test_a_group_may_have_its_ratio_taken_to_the_proximal_policy(changes: dict[str, Any]) -> None:
    (metrics, got), (named, expected) = (
        world.trained(engine, *(replace(group, proximal_ratio=mode == "bypass") for group in groups))
        for mode in ("bypass", "decoupled")
        for engine, groups in [world.moved(correction={"mode": mode}, **changes)]
    )
    assert metrics == named and metrics["clip_fraction"] == 0
    world.assert_gradients(got, expected, rtol=0, atol=0)
    engine, groups = world.moved(correction={"mode": "bypass"}, **changes)
    assert world.step_on(engine, *groups)["clip_fraction"] > 0


def test_rows_that_a_mask_takes_count_as_clipped() -> None:
    correction = {"mode": "decoupled", "weights": "importance", "kappa_nats": 0.2}
    engine, groups = world.moved(correction=correction)
    metrics = world.step_on(engine, *(replace(group, staleness=[[0, 0]] * 4) for group in groups))
    assert metrics["engine_mismatch_clipped"] == metrics["masked"] > 0


QUICKSTART = ROOT / "recipes" / "quickstart" / "checkpoint"
Velocity = Callable[..., Tensor]


def measured(monkeypatch: pytest.MonkeyPatch, velocity: Velocity) -> dict[str, float]:
    """Draws a group of the quickstart's model by `velocity`, with the clip range of a published recipe."""
    config = world.make_config(
        sampling={"height": 64, "width": 64},
        sde={"kind": "flow", "noise_level": 0.7, "window": {"size": 5, "range": [0, 5]}},
        clip_range=None,
        **{"model.path": str(QUICKSTART), "rollout.num_inference_steps": 10, "algorithm.clip_range_nats": 0.66},
    )
    monkeypatch.setattr(drawn, "compute_velocity", velocity)
    engine = world.started(config)
    return world.step_on(engine, drawn.drawn(engine.policy, config, SdeWindow(0, 5)))


def test_honest_bfloat16_is_nats_away_and_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Amplifies the error by 6, sqrt(36 864 / 1 024), so that the nats are those of an image of 384 x 384 pixels."""
    amplifiers: list[Amplifier] = []

    def rounded(policy: Any, components: Any, *rest: Any) -> Tensor:
        if not amplifiers:
            amplifiers.append(Amplifier(components["transformer"], 6.0))
        return compute_velocity(policy, components, *rest)

    metrics = measured(monkeypatch, rounded)
    assert metrics["engine_mismatch_nats"] > 1
    assert 0.01 < metrics["engine_mismatch_velocity"] < HONEST_ERROR["bfloat16"]
    steps = [metrics[f"engine_mismatch_nats/variance/step_{step:02d}"] for step in range(5)]
    assert max(steps[3:]) > 10 * steps[0], "later steps have less noise"


def late(policy: Any, components: Any, x: Tensor, sigma: Tensor, *rest: Any) -> Tensor:
    return compute_velocity(policy, components, x, 0.8 * sigma, *rest)


def test_a_wrong_time_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = measured(monkeypatch, late)
    assert metrics["engine_mismatch_velocity"] > HONEST_ERROR["bfloat16"]
    assert metrics["engine_mismatch_clipped"] > CLIPPED_AT_MOST
