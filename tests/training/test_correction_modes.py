"""Tests off-policy correction in the engine: which policy the ratio is taken to, weights, masks and their normaliser.
The gradient that the optimizer gets is compared with the definition."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from omni_async.config.algorithm import automatic_correction
from omni_async.training.engine import TrainEngine
from omni_async.training.groups import GroupBatch
from tests.fakes import TinyPolicy, load_model, tiny_group
from tests.training.training_world import (
    Step,
    assert_gradients,
    gradients,
    gradients_of,
    guided,
    make_config,
    model_of,
    nudge,
    started,
    stepped,
    steps_of,
    surrogate,
    weights,
)

ROWS = 16  # 2 groups x 4 samples x 2 steps


def moved(**changes: Any) -> tuple[TrainEngine, list[GroupBatch]]:
    """Returns an engine, and stale samples of other weights than its own."""
    engine = started(make_config(**changes))
    groups = [tiny_group(TinyPolicy(), engine.config, seed, staleness=1) for seed in (0, 1)]
    nudge(engine, size=0.05)
    return engine, groups


def trained(engine: TrainEngine, groups: list[GroupBatch]) -> tuple[dict[str, float], dict[str, Tensor]]:
    for group in groups:
        engine.accumulate(group, 1 / ROWS)
    return stepped(engine)


def plain(engine: TrainEngine, groups: list[GroupBatch], loss: Callable[[list[Step]], Tensor]) -> dict[str, Tensor]:
    """Returns the gradient of `loss` of all steps, under the engine's weights as they are."""
    model = model_of(engine)
    return gradients_of(loss([step for group in groups for step in steps_of(model, engine.config, group)]), model)


def mean(values: list[Tensor]) -> Tensor:
    return torch.stack(values).mean()


# ---- the policy that the ratio is taken to ---------------------------------------------------------------------------


def test_bypass_takes_the_ratio_to_the_recorded_log_probs():
    engine, groups = moved(clip_range=0.02, size=3)
    for t in groups[0].trajectories:  # an engine whose log-probs are not even those of any weights
        t["log_probs"] = t["log_probs"] + 0.01
    expected = plain(
        engine,
        groups,
        lambda steps: mean([surrogate((s.log_prob - s.recorded).exp(), s.advantage, 0.02) for s in steps]),
    )
    metrics, got = trained(engine, groups)
    assert_gradients(got, expected)
    assert 0 < metrics["clip_fraction"] < 1


@pytest.mark.parametrize("max_updates", [0, 2, 8])
def test_auto_is_what_the_staleness_budget_says(max_updates):
    budget = {"staleness.max_updates": max_updates}
    chosen = msgspec.to_builtins(automatic_correction(max_updates))
    named, automatic = ({**budget, "correction": c} for c in (chosen, {"mode": "auto"}))
    got, expected = (trained(*moved(**changes)) for changes in (automatic, named))
    assert got[0] == expected[0]
    assert_gradients(got[1], expected[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", ["none", "decoupled"])
def test_without_a_step_between_the_ratio_to_the_proximal_policy_is_one(mode):
    engine, groups = moved(correction={"mode": mode}, size=3)
    expected = plain(engine, groups, lambda steps: mean([-s.advantage * s.log_prob for s in steps]))
    metrics, got = trained(engine, groups)
    assert metrics["ratio_deviation"] == 0
    assert metrics["clip_fraction"] == 0
    assert metrics["log_ratio_nats/absmax"] > 0.1  # although the samples are stale
    assert_gradients(got, expected)


@pytest.mark.parametrize("weighted", [False, True])
def test_several_steps_of_an_update_take_the_ratio_to_the_pass_at_its_start(weighted):
    correction = {"mode": "decoupled", "weights": "importance", "cap": 1.1} if weighted else {"mode": "none"}
    engine, groups = moved(correction=correction, steps_per_update=2)
    start = model_of(engine)
    for group in groups:
        drifts = engine.recompute_proximal(group)
        rows = list(steps_of(start, engine.config, group))
        assert [len(d.log_ratio) for d in drifts] == [2, 2, 2, 2]
        assert {d.num_elements for d in drifts} == {24}
        assert [x for d in drifts for x in d.log_ratio] == pytest.approx([s.nats for s in rows], abs=2e-5)
        assert [x for d in drifts for x in d.kappa] == pytest.approx([s.kappa for s in rows], rel=1e-5)
    assert gradients(engine) == {}
    engine.accumulate(groups[0], 1 / 8)
    assert engine.step()["ratio_deviation"] < 1e-6

    def loss(steps: list[Step]) -> Tensor:
        before = list(steps_of(start, engine.config, groups[1]))
        weight = [min(math.exp(s.nats), 1.1) if weighted else 1.0 for s in before]
        return mean(
            [
                w * surrogate((s.log_prob - old.log_prob.detach()).exp(), s.advantage, 0.2)
                for w, s, old in zip(weight, steps, before, strict=True)
            ]
        )

    expected = plain(engine, groups[1:], loss)
    engine.accumulate(groups[1], 1 / 8)
    metrics, got = stepped(engine)
    assert metrics["ratio_deviation"] > 1e-3
    assert_gradients(got, expected, rtol=1e-4)

    # The update is over, and so is its proximal policy.
    engine.accumulate(groups[1], 1 / 8)
    assert engine.step()["ratio_deviation"] == 0


def test_interpolation_estimates_the_proximal_policy_from_staleness():
    engine, groups = moved(correction={"mode": "interpolated", "weights": "importance", "cap": None})
    groups = [replace(g, staleness=[[0, 1], [1, 3], [0, 0], [2, 2]]) for g in groups]

    def row(s: Step) -> Tensor:
        proximal = s.recorded + s.staleness / (s.staleness + 1) * (s.log_prob.item() - s.recorded)
        return math.exp(24 * (proximal - s.recorded)) * surrogate((s.log_prob - proximal).exp(), s.advantage, 0.2)

    expected = plain(engine, groups, lambda steps: mean([row(s) for s in steps]))
    assert_gradients(trained(engine, groups)[1], expected)


@pytest.mark.parametrize("mode", ["bypass", "decoupled"])
def test_means_of_the_policy_that_the_ratio_is_taken_to_reach_the_objective(mode):
    """Checks GRPO-Guard, rho = exp((Delta + <(mean - old mean)^2> / (2 S^2)) S), on the second step of an update."""
    changes = {"name": "grpo_guard", "algorithm.guard": {"scale": "sample"}, "correction": {"mode": mode}}
    engine, groups = moved(**changes, steps_per_update=2)
    start = model_of(engine)
    if mode == "decoupled":
        for group in groups:
            engine.recompute_proximal(group)
    engine.accumulate(groups[0], 1 / 8)
    engine.step()

    def loss(steps: list[Step]) -> Tensor:
        losses = []
        recorded = [m for t in groups[1].trajectories for m in t["means"]]
        for s, old, behaviour in zip(steps, steps_of(start, engine.config, groups[1]), recorded, strict=True):
            old_log_prob, old_mean = (
                (s.recorded, behaviour) if mode == "bypass" else (old.log_prob.detach(), old.mean.detach())
            )
            bias = (s.mean - old_mean).square().mean() / (2 * s.scale**2)
            losses.append(
                surrogate(((s.log_prob - old_log_prob + bias) * s.scale).exp(), s.advantage, 0.2)
                / (s.scale / s.std) ** 2
            )
        return mean(losses)

    expected = plain(engine, groups[1:], loss)
    engine.accumulate(groups[1], 1 / 8)
    assert_gradients(stepped(engine)[1], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(("flow_grpo", mode) for mode in ("bypass", "none", "decoupled", "interpolated")),
        *(("flow_dppo", mode) for mode in ("none", "decoupled")),
    ],
)
def test_recorded_means_that_are_not_asked_for_change_no_bit_of_the_weights(name, mode):
    changes = {"name": name, "clip_range": None, "correction": {"mode": mode}}
    (with_means, groups), (without, stripped) = moved(**changes), moved(**changes)
    for group in stripped:
        for trajectory in group.trajectories:
            del trajectory["means"]
    trained(with_means, groups)
    metrics, _ = trained(without, stripped)
    assert torch.equal(weights(with_means), weights(without))
    assert "kappa_nats" not in metrics


@pytest.mark.parametrize(
    "changes", [{"name": "flow_dppo", "clip_range": None}, {"correction": {"mode": "decoupled", "kappa_nats": 1.0}}]
)
def test_samples_without_means_are_refused_where_a_gradient_reads_them(changes):
    engine, groups = moved(**changes)
    for trajectory in groups[0].trajectories:
        del trajectory["means"]
    with pytest.raises(ValueError, match=r"the fields \['means'\] are missing"):
        engine.accumulate(groups[0], 1 / ROWS)


@pytest.mark.parametrize("name", ["flow_grpo", "gspo"])
@pytest.mark.parametrize("kind", ["flow", "dance", "cps"])
def test_a_clip_range_in_nats_clips_where_the_densities_of_whole_samples_say_so(kind, name):
    """Computes L = sum over elements of ((x' - recorded mean)^2 - (x' - mean)^2) / (2 S^2), of each step or, for gspo,
    averaged over a sample's."""
    clip, noise = (0.5 if kind == "dance" else 0.15), 0.8
    sde = {"kind": kind, "noise_level": noise, "window": {"size": 2, "range": [1, 3]}}
    changes = {"sde": sde, "name": name, "clip_range": None, "algorithm.clip_range_nats": clip}
    engine, groups = moved(**changes, size=4)
    model = model_of(engine)
    nats: list[float] = []
    for t in (t for group in groups for t in group.trajectories):
        sigmas = t["sigmas"].double()
        for k, i in enumerate(t["steps"].tolist()):
            x, x_next, recorded = t["latents"][k].double(), t["latents"][k + 1].double(), t["means"][k].double()
            v = guided(model, engine.policy, engine.config, t, x, sigmas[i]).detach()
            s, s_next = sigmas[i].item(), sigmas[i + 1].item()
            h = s - s_next
            if kind == "cps":
                scale, kept = s_next * math.sin(noise * math.pi / 2), s_next * math.cos(noise * math.pi / 2)
                ours = (1 - s_next) * (x - s * v) + kept * (x + (1 - s) * v)
            else:
                g2 = noise**2 * (s / (1 - s) if kind == "flow" else 1.0)
                scale = math.sqrt(g2 * h)
                ours = x * (1 - g2 / (2 * s) * h) - v * (1 + g2 * (1 - s) / (2 * s)) * h
            nats.append((((x_next - recorded).square() - (x_next - ours).square()).sum() / (2 * scale**2)).item())
    if name == "gspo":
        nats = [(a + b) / 2 for a, b in zip(nats[::2], nats[1::2], strict=True) for _ in (a, b)]
    assert min(abs(abs(x) - clip) for x in nats) > 1e-3
    metrics, _ = trained(engine, groups)
    assert metrics["clipped_high"] == sum(x > clip for x in nats) / ROWS
    assert metrics["clipped_low"] == sum(x < -clip for x in nats) / ROWS
    assert 0 < metrics["clip_fraction"] < 1


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [None, 1.1])
@pytest.mark.parametrize(
    ("level", "log_ratio"),
    [("step", "sum"), ("step", "mean"), ("trajectory", "sum"), ("trajectory", "mean"), ("sequence", "mean")],
)
def test_importance_weights_multiply_the_gradient(cap, level, log_ratio):
    correction = {"mode": "decoupled", "weights": "importance", "cap": cap, "level": level, "log_ratio": log_ratio}
    engine, groups = moved(correction=correction, size=3)

    def loss(steps: list[Step]) -> Tensor:
        losses = []
        for i, s in enumerate(steps):
            both = [steps[i - i % 2].nats, steps[i - i % 2 + 1].nats]  # the two steps of the sample
            exponent = s.nats if level == "step" else sum(both)
            if log_ratio == "mean":
                exponent = {"step": s.nats / 24, "trajectory": sum(both) / 2 / 24, "sequence": sum(both) / 24}[level]
            losses.append(-min(math.exp(exponent), cap or math.inf) * s.advantage * s.log_prob)
        return mean(losses)

    expected = plain(engine, groups, loss)
    metrics, got = trained(engine, groups)
    assert_gradients(got, expected)
    assert metrics["ratio_deviation"] == 0


@pytest.mark.parametrize("denominator", ["kept", "all"])
def test_normalised_weights_are_divided_by_their_mean_over_the_rows_that_the_denominator_counts(denominator):
    correction = {
        "mode": "decoupled",
        "weights": "importance",
        "normalise": True,
        "band": (0.7, 1.6),
        "kappa_nats": 0.25,
        "denominator": denominator,
    }
    engine, groups = moved(correction=correction, size=3)

    def loss(steps: list[Step]) -> Tensor:
        inside = [(math.exp(s.nats), s) for s in steps if 0.7 <= math.exp(s.nats) <= 1.6]
        kept = [(w, s) for w, s in inside if s.kappa <= 0.25]
        assert 2 < len(kept) < len(inside) < ROWS
        below = sum(w for w, _ in (kept if denominator == "kept" else inside))
        return torch.stack([-w * s.advantage * s.log_prob for w, s in kept]).sum() / below

    expected = plain(engine, groups, loss)
    metrics, got = trained(engine, groups)
    assert_gradients(got, expected)
    assert metrics["grad_norm"] == pytest.approx(
        math.sqrt(sum(g.square().sum().item() for g in expected.values())), rel=1e-5
    )


def test_weights_given_by_the_update_replace_those_of_the_rows():
    correction = {"mode": "decoupled", "weights": "importance", "kappa_nats": 0.2}
    changes = {"correction": correction, "kl_coef": 0.3, "size": 3}
    engine, groups = moved(**changes)
    given = [[[0.5, 2.0], [0.0, 1.0], [0.25, 0.0], [3.0, 1.5]], [[1.0, 0.1], [0.2, 0.3], [0.0, 0.0], [0.7, 0.8]]]
    groups = [replace(g, weights=w) for g, w in zip(groups, given, strict=True)]
    reference = [s for g in groups for s in steps_of(load_model(TinyPolicy(), torch.float64), engine.config, g)]
    flat = [w for group in given for sample in group for w in sample]

    def loss(steps: list[Step]) -> Tensor:
        losses = []
        for w, s, r in zip(flat, steps, reference, strict=True):
            kl = (s.mean - r.mean.detach()).square().mean() / (2 * s.std**2)
            losses.append(-w * s.advantage * s.log_prob + 0.3 * kl)
        return mean(losses)

    expected = plain(engine, groups, loss)
    metrics, got = trained(engine, groups)
    assert_gradients(got, expected)
    assert metrics["weight/mean"] == pytest.approx(sum(flat) / ROWS)
    assert metrics["masked"] == 4 / ROWS
    assert "masked/kappa_nats" not in metrics


# ---- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("denominator", ["kept", "all"])
def test_steps_that_drifted_too_far_are_masked(denominator):
    correction = {
        "mode": "decoupled",
        "weights": "importance",
        "cap": None,
        "kappa_nats": 0.2,
        "denominator": denominator,
    }
    engine, groups = moved(correction=correction, size=3)
    kept = 0

    def loss(steps: list[Step]) -> Tensor:
        nonlocal kept
        rows = [-math.exp(s.nats) * s.advantage * s.log_prob for s in steps if s.kappa <= 0.2]
        kept = len(rows)
        return torch.stack(rows).sum() / (kept if denominator == "kept" else ROWS)

    expected = plain(engine, groups, loss)
    assert 2 < kept < ROWS - 2
    metrics, got = trained(engine, groups)
    assert_gradients(got, expected)
    assert metrics["masked"] == metrics["masked/kappa_nats"] == 1 - kept / ROWS
    assert metrics["advantage_abs"] == pytest.approx(sum(abs(a) for g in groups for a in g.advantages) / 8)


@pytest.mark.parametrize("mode", ["bypass", "decoupled"])
@pytest.mark.parametrize("size", [1, 5, 100])
def test_rejection_of_samples_sees_whole_samples(mode, size):
    correction = {"mode": mode, "k1": (math.exp(-0.25), math.exp(0.1)), "reject_level": "sum"}
    engine, groups = moved(correction=correction, size=size)
    for rows, counts in engine._loss.batches(groups[0]):
        assert counts
        assert rows.row_ids == [(sample, n) for sample in sorted({i for i, _ in rows.row_ids}) for n in (0, 1)]
        assert len(rows.row_ids) <= max(2, size)
    kept: list[int] = []

    def loss(steps: list[Step]) -> Tensor:
        losses = []
        for i in range(0, ROWS, 2):
            if -0.25 <= steps[i].nats + steps[i + 1].nats <= 0.1:
                kept.append(i)
                for s in steps[i : i + 2]:
                    old = s.recorded if mode == "bypass" else s.log_prob.detach()
                    losses.append(surrogate((s.log_prob - old).exp(), s.advantage, 0.2))
        return mean(losses)

    expected = plain(engine, groups, loss)
    assert 1 < len(kept) < 7
    metrics, got = trained(engine, groups)
    assert_gradients(got, expected)
    assert metrics["masked/k1"] == 1 - len(kept) / 8


def test_nothing_left_is_no_gradient_and_no_loss():
    correction = {"mode": "decoupled", "kappa_nats": 1e-6}
    changes = {"optimizer": "sgd", "trainer.optimizer.weight_decay": 0.0}
    engine, groups = moved(correction=correction, **changes)
    before = weights(engine)
    metrics, _ = trained(engine, groups)
    assert torch.equal(weights(engine), before)
    assert (metrics["masked"], metrics["loss"], metrics["grad_norm"]) == (1, 0, 0)


@pytest.mark.parametrize(
    "correction",
    [
        {"weights": "importance", "normalise": True, "kappa_nats": 0.2},
        {"weights": "importance", "normalise": True, "kappa_nats": 0.2, "denominator": "all"},
        {"weights": "importance", "kappa_nats": 0.2, "k2": 0.02},
        {"weights": "importance", "level": "sequence", "log_ratio": "mean", "kappa_nats": 0.2},
        {"weights": "importance", "level": "trajectory", "k3": 0.05, "reject_level": "max"},
    ],
)
def test_the_normaliser_is_the_updates_however_rows_are_cut(correction):
    results = []
    for size in (1, 3, 100):
        changes = {"correction": {"mode": "decoupled", **correction}, "size": size}
        results.append(trained(*moved(**changes)))
    assert 0 < results[0][0]["masked"] < 1
    for metrics, grads in results[1:]:
        assert_gradients(grads, results[0][1])
        assert metrics == pytest.approx(results[0][0], rel=1e-4, abs=1e-6)


def test_the_normaliser_of_an_abandoned_update_is_forgotten():
    correction = {"mode": "decoupled", "kappa_nats": 0.2}
    engine, groups = moved(correction=correction)
    other, _ = moved(correction=correction)
    engine.accumulate(groups[1], 1.0)
    engine.discard()
    assert_gradients(trained(engine, groups[:1])[1], trained(other, groups[:1])[1], rtol=0, atol=1e-12)
