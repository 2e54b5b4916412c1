"""Tests off-policy correction in the engine: which policy the ratio is taken to, weights, masks and their normaliser.
The gradient that the optimizer gets is compared with the definition."""

import math
from dataclasses import replace

import msgspec
import pytest
import torch
from torch import Tensor

from omni_async.config.algorithm import automatic_correction
from tests.support.fakes import TinyPolicy, load_model
from tests.training.training_world import (
    Step,
    assert_gradients,
    assert_trains,
    gradients,
    model_of,
    moved,
    step_on,
    steps_of,
    surrogate,
    trained,
    weights,
)

ROWS = 16  # 2 groups x 4 samples x 2 steps
WEIGHTED = {"mode": "decoupled", "weights": "importance"}


# ---- the policy that the ratio is taken to ---------------------------------------------------------------------------


def test_bypass_takes_the_ratio_to_the_recorded_log_probs():
    engine, groups = moved(clip_range=0.02, size=3)
    for t in groups[0].trajectories:  # an engine whose log-probs are not even those of any weights
        t["log_probs"] = t["log_probs"] + 0.01
    metrics = assert_trains(engine, groups, lambda steps: [surrogate(s.ratio, s.advantage, 0.02) for s in steps])
    assert 0 < metrics["clip_fraction"] < 1


@pytest.mark.parametrize("max_updates", [0, 2, 8])
def test_auto_is_what_the_staleness_budget_says(max_updates):
    budget = {"staleness.max_updates": max_updates}
    chosen = msgspec.to_builtins(automatic_correction(max_updates))
    (metrics, got), (of_named, expected) = (
        trained(engine, *groups)
        for engine, groups in (moved(**budget, correction=c) for c in ({"mode": "auto"}, chosen))
    )
    assert metrics == of_named
    assert_gradients(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", ["none", "decoupled"])
def test_without_a_step_between_the_ratio_to_the_proximal_policy_is_one(mode):
    engine, groups = moved(correction={"mode": mode}, size=3)
    metrics = assert_trains(engine, groups, lambda steps: [-s.advantage * s.log_prob for s in steps])
    assert (metrics["ratio_deviation"], metrics["clip_fraction"]) == (0, 0)
    assert metrics["log_ratio_nats/absmax"] > 0.1  # although the samples are stale


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
    assert step_on(engine, groups[0])["ratio_deviation"] < 1e-6

    def losses(steps: list[Step]) -> list[Tensor]:
        found = []
        for s, old in zip(steps, steps_of(start, engine.config, groups[1]), strict=True):
            weight = min(math.exp(old.nats), 1.1) if weighted else 1.0
            found.append(weight * surrogate((s.log_prob - old.log_prob.detach()).exp(), s.advantage))
        return found

    assert assert_trains(engine, groups[1:], losses, rtol=1e-4)["ratio_deviation"] > 1e-3
    # The update is over, and so is its proximal policy.
    assert step_on(engine, groups[1])["ratio_deviation"] == 0


def test_interpolation_estimates_the_proximal_policy_from_staleness():
    engine, groups = moved(correction={"mode": "interpolated", "weights": "importance", "cap": None})
    groups = [replace(g, staleness=[[0, 1], [1, 3], [0, 0], [2, 2]]) for g in groups]

    def loss(s: Step) -> Tensor:
        proximal = s.recorded + s.staleness / (s.staleness + 1) * (s.log_prob.item() - s.recorded)
        return math.exp(24 * (proximal - s.recorded)) * surrogate((s.log_prob - proximal).exp(), s.advantage)

    assert_trains(engine, groups, lambda steps: [loss(s) for s in steps])


@pytest.mark.parametrize("mode", ["bypass", "decoupled"])
def test_means_of_the_policy_that_the_ratio_is_taken_to_reach_the_objective(mode):
    """Checks GRPO-Guard, rho = exp((Delta + <(mean - old mean)^2> / (2 S^2)) S), on the second step of an update."""
    changes = {"name": "grpo_guard", "algorithm.guard": {"scale": "sample"}, "correction": {"mode": mode}}
    engine, groups = moved(**changes, steps_per_update=2)
    start = model_of(engine)
    if mode == "decoupled":
        for group in groups:
            engine.recompute_proximal(group)
    step_on(engine, groups[0])

    def losses(steps: list[Step]) -> list[Tensor]:
        found = []
        recorded = [m for t in groups[1].trajectories for m in t["means"]]
        for s, old, behaviour in zip(steps, steps_of(start, engine.config, groups[1]), recorded, strict=True):
            log_prob, mean = (s.recorded, behaviour) if mode == "bypass" else (old.log_prob.detach(), old.mean.detach())
            bias = (s.mean - mean).square().mean() / (2 * s.scale**2)
            ratio = ((s.log_prob - log_prob + bias) * s.scale).exp()
            found.append(surrogate(ratio, s.advantage) / (s.scale / s.std) ** 2)
        return found

    assert_trains(engine, groups[1:], losses, rtol=1e-4, atol=1e-6)


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
    assert "kappa_nats" in step_on(with_means, *groups) and "kappa_nats" not in step_on(without, *stripped)
    assert torch.equal(weights(with_means), weights(without))


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
def test_a_clip_range_in_nats_clips_where_the_densities_of_whole_samples_say_so(name):
    """Takes densities of each step or, for gspo, their mean over a sample's."""
    engine, groups = moved(**{"name": name, "clip_range": None, "algorithm.clip_range_nats": 0.15}, size=4)
    nats = torch.tensor([s.nats for group in groups for s in steps_of(model_of(engine), engine.config, group)])
    if name == "gspo":
        nats = nats.view(-1, 2).mean(1).repeat_interleave(2)
    assert (nats.abs() - 0.15).abs().min() > 1e-3
    metrics = step_on(engine, *groups)
    assert metrics["clipped_high"] == (nats > 0.15).double().mean()
    assert metrics["clipped_low"] == (nats < -0.15).double().mean()
    assert 0 < metrics["clip_fraction"] < 1


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [None, 1.1])
@pytest.mark.parametrize(
    ("level", "log_ratio"),
    [("step", "sum"), ("step", "mean"), ("trajectory", "sum"), ("trajectory", "mean"), ("sequence", "mean")],
)
def test_importance_weights_multiply_the_gradient(cap, level, log_ratio):
    engine, groups = moved(correction={**WEIGHTED, "cap": cap, "level": level, "log_ratio": log_ratio}, size=3)

    def losses(steps: list[Step]) -> list[Tensor]:
        found = []
        for i, s in enumerate(steps):
            both = steps[i - i % 2].nats + steps[i - i % 2 + 1].nats  # the two steps of the sample
            exponent = s.nats if level == "step" else both
            if log_ratio == "mean":
                exponent = {"step": s.nats / 24, "trajectory": both / 2 / 24, "sequence": both / 24}[level]
            found.append(-min(math.exp(exponent), cap or math.inf) * s.advantage * s.log_prob)
        return found

    assert assert_trains(engine, groups, losses)["ratio_deviation"] == 0


@pytest.mark.parametrize("denominator", ["kept", "all"])
@pytest.mark.parametrize("normalised", [True, False])
def test_masked_steps_and_normalised_weights_are_divided_by_the_rows_that_the_denominator_counts(
    denominator, normalised
):
    band = {"normalise": True, "band": (0.7, 1.6)} if normalised else {"cap": None}
    correction = {**WEIGHTED, **band, "kappa_nats": 0.25 if normalised else 0.2, "denominator": denominator}
    engine, groups = moved(correction=correction, size=3)
    num_kept = 0

    def loss(steps: list[Step]) -> Tensor:
        nonlocal num_kept
        weighted = [(math.exp(s.nats), s) for s in steps]
        inside = [(w, s) for w, s in weighted if not normalised or 0.7 <= w <= 1.6]
        kept = [(w, s) for w, s in inside if s.kappa <= correction["kappa_nats"]]
        num_kept = len(kept)
        assert 2 < num_kept < len(inside) <= (ROWS - 1 if normalised else ROWS)
        counted = kept if denominator == "kept" else inside
        below = sum(w for w, _ in counted) if normalised else len(counted)
        return torch.stack([-w * s.advantage * s.log_prob for w, s in kept]).sum() / below

    metrics = assert_trains(engine, groups, loss)
    assert metrics["masked"] == 1 - num_kept / ROWS
    assert normalised or metrics["masked/kappa_nats"] == metrics["masked"]
    assert metrics["advantage_abs"] == pytest.approx(sum(abs(a) for g in groups for a in g.advantages) / 8)


def test_weights_given_by_the_update_replace_those_of_the_rows():
    engine, groups = moved(correction={**WEIGHTED, "kappa_nats": 0.2}, kl_coef=0.3, size=3)
    given = torch.tensor([0.5, 2.0, 0, 1.0, 0.25, 0, 3.0, 1.5, 1.0, 0.1, 0.2, 0.3, 0, 0, 0.7, 0.8])
    groups = [replace(g, weights=w.tolist()) for g, w in zip(groups, given.view(2, 4, 2), strict=True)]
    reference = [s for g in groups for s in steps_of(load_model(TinyPolicy(), torch.float64), engine.config, g)]

    def losses(steps: list[Step]) -> list[Tensor]:
        found = []
        for w, s, r in zip(given.tolist(), steps, reference, strict=True):
            kl = (s.mean - r.mean.detach()).square().mean() / (2 * s.std**2)
            found.append(-w * s.advantage * s.log_prob + 0.3 * kl)
        return found

    metrics = assert_trains(engine, groups, losses)
    assert metrics["weight/mean"] == pytest.approx(given.mean().item())
    assert metrics["masked"] == 4 / ROWS
    assert "masked/kappa_nats" not in metrics


# ---- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["bypass", "decoupled"])
@pytest.mark.parametrize("size", [1, 5, 100])
def test_rejection_of_samples_sees_whole_samples(mode, size):
    correction = {"mode": mode, "k1": (math.exp(-0.25), math.exp(0.1)), "reject_level": "sum"}
    engine, groups = moved(correction=correction, size=size)
    for rows, counts in engine._loss.batches(groups[0]):
        assert counts
        assert rows.row_ids == [(sample, n) for sample in sorted({i for i, _ in rows.row_ids}) for n in (0, 1)]
        assert len(rows.row_ids) <= max(2, size)
    kept: list[Step] = []

    def losses(steps: list[Step]) -> list[Tensor]:
        for both in zip(steps[::2], steps[1::2], strict=True):
            kept.extend(both if -0.25 <= sum(s.nats for s in both) <= 0.1 else ())
        olds = [s.recorded if mode == "bypass" else s.log_prob.detach() for s in kept]
        return [surrogate((s.log_prob - old).exp(), s.advantage) for s, old in zip(kept, olds, strict=True)]

    metrics = assert_trains(engine, groups, losses)
    assert 2 < len(kept) < 14
    assert metrics["masked/k1"] == 1 - len(kept) / ROWS


def test_nothing_left_is_no_gradient_and_no_loss():
    changes = {"optimizer": "sgd", "trainer.optimizer.weight_decay": 0.0}
    engine, groups = moved(correction={"mode": "decoupled", "kappa_nats": 1e-6}, **changes)
    before = weights(engine)
    metrics = step_on(engine, *groups)
    assert torch.equal(weights(engine), before)
    assert (metrics["masked"], metrics["loss"], metrics["grad_norm"]) == (1, 0, 0)


@pytest.mark.parametrize(
    "correction",
    [
        {"normalise": True, "kappa_nats": 0.2},
        {"normalise": True, "kappa_nats": 0.2, "denominator": "all"},
        {"kappa_nats": 0.2, "k2": 0.02},
        {"level": "sequence", "log_ratio": "mean", "kappa_nats": 0.2},
        {"level": "trajectory", "k3": 0.05, "reject_level": "max"},
    ],
)
def test_the_normaliser_is_the_updates_however_rows_are_cut(correction):
    results = []
    for size in (1, 3, 100):
        engine, groups = moved(correction={**WEIGHTED, **correction}, size=size)
        metrics, got = trained(engine, *groups)
        results.append((metrics, got))
        assert 0 < metrics["masked"] < 1
        assert metrics["grad_norm"] == pytest.approx(math.sqrt(sum(g.square().sum().item() for g in got.values())))
        assert_gradients(got, results[0][1])
        assert metrics == pytest.approx(results[0][0], rel=1e-4, abs=1e-6)
