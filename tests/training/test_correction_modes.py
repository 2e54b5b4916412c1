"""Tests off-policy correction in the engine: the gradient that the optimizer gets is the definition's."""

import math
from dataclasses import replace
from itertools import cycle

import msgspec
import pytest
import torch
from torch import Tensor

from omni_async.algorithms.correction import Drift, correct, loss_factor, normaliser
from omni_async.config.algorithm import automatic_correction
from tests.support.fakes import TinyPolicy, load_model
from tests.training import training_world as world

ROWS = 16  # 2 groups x 4 samples x 2 steps
WEIGHTED = {"mode": "decoupled", "weights": "importance"}


@pytest.mark.parametrize("reason", [None, "rounding", "drift"])
def test_auto_trains_like_the_correction_that_it_stands_for(reason):
    """Takes the weights of an update, as its rule sends them after a decision. Ranks know the start alone."""
    chosen = automatic_correction(reason)
    (engine, groups), (named, same) = (
        world.moved(0.15, **{"staleness.max_updates": 8}, correction=c)
        for c in ({"mode": "auto"}, msgspec.to_builtins(chosen))
    )
    if chosen.needs_update:
        drifts = [drift for group in same for drift in named.recompute_proximal(group)]
        steps = torch.tensor([drift.steps for drift in drifts])
        rows = Drift(torch.tensor([drift.log_ratio for drift in drifts], dtype=torch.float64), None, steps)
        corrected = correct(rows, chosen, 24)
        weights = corrected.weight * loss_factor(*normaliser(corrected, chosen))
        assert 0 < corrected.gamma.unique().item() < 1
        groups, same = (
            [replace(g, weights=w.tolist()) for g, w in zip(its, weights.view(2, 4, 2), strict=True)]
            for its in (groups, same)
        )
    if reason is not None:
        groups = [replace(group, proximal_ratio=True) for group in groups]
    (metrics, got), (of_named, expected) = world.trained(engine, *groups), world.trained(named, *same)
    assert metrics == of_named
    world.assert_gradients(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
def test_several_steps_of_an_update_take_the_ratio_to_the_pass_at_its_start(weighted):
    correction = {"mode": "decoupled", "weights": "importance", "cap": 1.1} if weighted else {"mode": "none"}
    engine, groups = world.moved(correction=correction, steps_per_update=2)
    start = world.model_of(engine)
    for group in groups:
        drifts = engine.recompute_proximal(group)
        rows = list(world.steps_of(start, engine.config, group))
        assert [len(d.log_ratio) for d in drifts] == [2, 2, 2, 2]
        assert {d.num_elements for d in drifts} == {24}
        assert [x for d in drifts for x in d.log_ratio] == pytest.approx([s.nats for s in rows], abs=2e-5)
        assert [x for d in drifts for x in d.kappa] == pytest.approx([s.kappa for s in rows], rel=1e-5)
    assert world.gradients(engine) == {}
    assert world.step_on(engine, groups[0])["ratio_deviation"] < 1e-6

    def losses(steps: list[world.Step]) -> list[Tensor]:
        found = []
        for s, old in zip(steps, world.steps_of(start, engine.config, groups[1]), strict=True):
            weight = min(math.exp(old.nats), 1.1) if weighted else 1.0
            found.append(weight * world.surrogate((s.log_prob - old.log_prob.detach()).exp(), s.advantage))
        return found

    assert world.assert_trains(engine, groups[1:], losses, rtol=1e-4)["ratio_deviation"] > 1e-3
    # The update is over, and so is its proximal policy.
    assert world.step_on(engine, groups[1])["ratio_deviation"] == 0


@pytest.mark.parametrize("interpolation", ["loglinear", "linear"])
def test_interpolation_estimates_the_proximal_policy_from_staleness(interpolation):
    correction = {"mode": "interpolated", "weights": "importance", "cap": None, "interpolation": interpolation}
    engine, groups = world.moved(correction=correction)
    groups = [replace(g, staleness=[[0, 1], [1, 3], [0, 0], [2, 2]]) for g in groups]

    def loss(s: world.Step) -> Tensor:
        alpha, moved = s.staleness / (s.staleness + 1), s.log_prob.item() - s.recorded
        if interpolation == "loglinear":
            proximal = s.recorded + alpha * moved
        else:
            proximal = s.recorded + math.log(1 - alpha + alpha * math.exp(24 * moved)) / 24
        return math.exp(24 * (proximal - s.recorded)) * world.surrogate((s.log_prob - proximal).exp(), s.advantage)

    world.assert_trains(engine, groups, lambda steps: [loss(s) for s in steps])


@pytest.mark.parametrize("mode", ["bypass", "decoupled"])
def test_means_of_the_policy_that_the_ratio_is_taken_to_reach_the_objective(mode):
    """Checks GRPO-Guard, rho = exp((Delta + <(mean - old mean)^2> / (2 S^2)) S), on the second step of an update."""
    changes = {"name": "grpo_guard", "algorithm.guard": {"scale": "sample"}, "correction": {"mode": mode}}
    engine, groups = world.moved(**changes, steps_per_update=2)
    start = world.model_of(engine)
    if mode == "decoupled":
        for group in groups:
            engine.recompute_proximal(group)
    world.step_on(engine, groups[0])

    def losses(steps: list[world.Step]) -> list[Tensor]:
        found = []
        recorded = [m for t in groups[1].trajectories for m in t["means"]]
        for s, old, behaviour in zip(steps, world.steps_of(start, engine.config, groups[1]), recorded, strict=True):
            log_prob, mean = (s.recorded, behaviour) if mode == "bypass" else (old.log_prob.detach(), old.mean.detach())
            bias = (s.mean - mean).square().mean() / (2 * s.scale**2)
            ratio = ((s.log_prob - log_prob + bias) * s.scale).exp()
            found.append(world.surrogate(ratio, s.advantage) / (s.scale / s.std) ** 2)
        return found

    world.assert_trains(engine, groups[1:], losses, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(("flow_grpo", mode) for mode in ("bypass", "none", "decoupled", "interpolated")),
        *(("flow_dppo", mode) for mode in ("none", "decoupled")),
    ],
)
def test_recorded_means_that_are_not_asked_for_change_no_bit_of_the_weights(name, mode):
    changes = {"name": name, "clip_range": None, "correction": {"mode": mode}}
    (with_means, groups), (without, stripped) = world.moved(**changes), world.moved(**changes)
    for group in stripped:
        for trajectory in group.trajectories:
            del trajectory["means"]
    assert "kappa_nats" in world.step_on(with_means, *groups) and "kappa_nats" not in world.step_on(without, *stripped)
    assert torch.equal(world.weights(with_means), world.weights(without))


@pytest.mark.parametrize(
    "changes", [{"name": "flow_dppo", "clip_range": None}, {"correction": {"mode": "decoupled", "kappa_nats": 1.0}}]
)
def test_samples_without_means_are_refused_where_a_gradient_reads_them(changes):
    engine, groups = world.moved(**changes)
    for trajectory in groups[0].trajectories:
        del trajectory["means"]
    with pytest.raises(ValueError, match=r"the fields \['means'\] are missing"):
        engine.accumulate(groups[0], 1 / ROWS)


@pytest.mark.parametrize("name", ["flow_grpo", "gspo"])
def test_a_clip_range_in_nats_clips_where_the_densities_of_whole_samples_say_so(name):
    """Takes densities of each step or, for gspo, their mean over a sample's."""
    engine, groups = world.moved(**{"name": name, "clip_range": None, "algorithm.clip_range_nats": 0.15}, size=4)
    nats = torch.tensor(
        [s.nats for group in groups for s in world.steps_of(world.model_of(engine), engine.config, group)]
    )
    if name == "gspo":
        nats = nats.view(-1, 2).mean(1).repeat_interleave(2)
    assert (nats.abs() - 0.15).abs().min() > 1e-3
    metrics = world.step_on(engine, *groups)
    assert metrics["clipped_high"] == (nats > 0.15).double().mean()
    assert metrics["clipped_low"] == (nats < -0.15).double().mean()
    assert 0 < metrics["clip_fraction"] < 1


BAND = {**WEIGHTED, "normalise": True, "band": (0.7, 1.6), "kappa_nats": 0.25}
MASKED = {**WEIGHTED, "cap": None, "kappa_nats": 0.2}
REJECTED = {"k1": (math.exp(-0.25), math.exp(0.1)), "reject_level": "sum"}


CORRECTIONS = [
    {**WEIGHTED, "cap": None},
    {**WEIGHTED, "cap": 1.1, "log_ratio": "mean"},
    {**WEIGHTED, "cap": 1.1, "level": "trajectory"},
    {**WEIGHTED, "cap": None, "level": "trajectory", "log_ratio": "mean", "k3": 0.0003, "reject_level": "max"},
    {**MASKED, "level": "sequence", "log_ratio": "mean"},
    *({**base, "denominator": which} for base in (BAND, MASKED) for which in ("kept", "all")),
    {**WEIGHTED, "kappa_nats": 0.2, "k2": 0.02},
    {**WEIGHTED, "cap": 1.1, "floor": 0.9, "band": (0.7, 1.6)},
    {"mode": "decoupled", "k1": (0.6, 1.5), "k2": 0.1, "k3": 0.11, "reject_level": {"k2": "max", "k3": "sum"}},
    *({"mode": mode} for mode in ("none", "bypass", "decoupled")),
    {"mode": "bypass", **REJECTED},
    {"mode": "decoupled", **REJECTED},
]


@pytest.mark.sliced(floor=8)
@pytest.mark.parametrize(("correction", "size"), zip(CORRECTIONS, cycle([1, 5, 100]), strict=False))
def test_the_gradient_is_that_of_weighted_and_masked_rows_however_they_are_cut(correction, size):
    """Other tests cover the formulas of `correct`."""
    engine, groups = world.moved(correction=correction, size=size)
    settings, corrected = engine.config.algorithm.correction, []

    def loss(steps: list[world.Step]) -> Tensor:
        rows = torch.tensor([[s.nats, s.kappa] for s in steps], dtype=torch.float64)
        corrected.append(correct(Drift(*rows.T.reshape(2, -1, 2)), settings, 24))
        olds = [s.recorded if settings.mode == "bypass" else s.log_prob.detach() for s in steps]
        losses = [world.surrogate((s.log_prob - old).exp(), s.advantage) for s, old in zip(steps, olds, strict=True)]
        mean = (corrected[0].weight.flatten() * torch.stack(losses)).mean()
        return mean * loss_factor(*normaliser(corrected[0], settings))

    metrics = world.assert_trains(engine, groups, loss)
    [found] = corrected
    assert (metrics["ratio_deviation"] > 0) == (settings.mode == "bypass"), "otherwise no step lies between"
    assert metrics["log_ratio_nats/absmax"] > 0.1, "the samples are stale"
    assert metrics.get("masked", 0) == (~found.kept).double().mean().item() < 1
    assert all(metrics[f"masked/{name}"] == masked.double().mean().item() > 0 for name, masked in found.masked.items())


REINFORCE = {"name": "reinforce", "clip_range": None}


@pytest.mark.parametrize(
    ("size", "changes"), [(1, {}), (5, {"cap": None, "kappa_nats": 0.2}), (100, {"k1": (0.7, 1.6)})]
)
def test_reinforce_in_bypass_weighs_the_score_by_the_current_policys_ratio(size, changes):
    """Takes the second optimizer step of an update, whose policy no pass at its start has seen."""
    correction = {"mode": "bypass", "weights": "importance", "cap": 1.1, **changes}
    engine, groups = world.moved(**REINFORCE, correction=correction, size=size, steps_per_update=2, lr=1e-3)
    world.step_on(engine, groups[0])

    def loss(steps: list[world.Step]) -> Tensor:
        kept = [
            s.kappa <= changes.get("kappa_nats", math.inf)
            and changes.get("k1", (0, 0))[0] <= math.exp(s.nats) <= changes.get("k1", (0, math.inf))[1]
            for s in steps
        ]
        weights = [
            keep * min(math.exp(s.nats), correction["cap"] or math.inf) for s, keep in zip(steps, kept, strict=True)
        ]
        assert len(set(kept)) == 1 + bool({"kappa_nats", "k1"} & changes.keys()) and min(weights) != max(weights)
        return sum(-w * s.advantage * s.log_prob for w, s in zip(weights, steps, strict=True)) / sum(kept)

    world.assert_trains(engine, groups[1:], loss)


def test_reinforce_without_weights_is_plain():
    for mode in ("bypass", "none"):
        engine, groups = world.moved(**REINFORCE, correction={"mode": mode})
        metrics = world.assert_trains(engine, groups, lambda steps: [-s.advantage * s.log_prob for s in steps])
        assert "weight/mean" not in metrics and (metrics["ratio_deviation"] > 0) == (mode == "bypass")


@pytest.mark.parametrize(("mode", "lr", "rule"), [("bypass", 1e-3, 0.05), ("decoupled", 1e-2, 0.03)])
@pytest.mark.parametrize("size", [2, 100])
def test_gspo_over_kept_steps_with_a_clip_centred_on_the_drift(mode, lr, rule, size):
    """Takes the second step of an update: the drift is that from the engines, or from the pass at its start."""
    low, high = 0.02, 0.01
    changes = {"name": "gspo", "clip_range": (low, high), "algorithm.clip_centre": "drift", "steps_per_update": 2}
    engine, groups = world.moved(**changes, lr=lr, correction={"mode": mode, "k2": rule, "steps": "kept"}, size=size)
    start = world.model_of(engine)
    if mode == "decoupled":
        for group in groups:
            engine.recompute_proximal(group)
    world.step_on(engine, groups[0])
    outside: list[bool] = []

    def loss(steps: list[world.Step]) -> Tensor:
        olds = list(world.steps_of(start, engine.config, groups[1]))
        judged = steps if mode == "bypass" else olds
        total, kept_rows = torch.zeros((), dtype=torch.float64), 0
        for first in range(0, len(steps), 2):
            kept = [i for i in (first, first + 1) if judged[i].nats ** 2 / 2 <= rule]
            if not kept:
                continue
            kept_rows += len(kept)
            log_ratio, drift = torch.zeros((), dtype=torch.float64), 0.0
            for i in kept:
                s, old = steps[i], olds[i]
                log_prob = s.recorded if mode == "bypass" else old.log_prob.item()
                moved = (s.mean - old.mean).square().mean().item() / (2 * s.scale**2)
                log_ratio = log_ratio + (s.log_prob - log_prob) / len(kept)
                drift += (s.kappa / s.elements if mode == "bypass" else moved) / len(kept)
            centred, A = math.exp(log_ratio.item() + drift), steps[first].advantage
            outside.append((centred > 1 + high and A > 0) or (centred < 1 - low and A < 0))
            if not outside[-1]:
                total = total - len(kept) * A * log_ratio.exp()
        assert kept_rows < len(steps)
        return total / kept_rows

    world.assert_trains(engine, groups[1:], loss, rtol=1e-4, atol=1e-6)
    assert len(set(outside)) == 2


def test_weights_given_by_the_update_replace_those_of_the_rows():
    engine, groups = world.moved(correction={**WEIGHTED, "kappa_nats": 0.2}, kl_coef=0.3, size=3)
    given = torch.tensor([0.5, 2.0, 0, 1.0, 0.25, 0, 3.0, 1.5, 1.0, 0.1, 0.2, 0.3, 0, 0, 0.7, 0.8])
    groups = [replace(g, weights=w.tolist()) for g, w in zip(groups, given.view(2, 4, 2), strict=True)]
    reference = [s for g in groups for s in world.steps_of(load_model(TinyPolicy(), torch.float64), engine.config, g)]

    def losses(steps: list[world.Step]) -> list[Tensor]:
        found = []
        for w, s, r in zip(given.tolist(), steps, reference, strict=True):
            kl = (s.mean - r.mean.detach()).square().mean() / (2 * s.std**2)
            found.append(-w * s.advantage * s.log_prob + 0.3 * kl)
        return found

    metrics = world.assert_trains(engine, groups, losses)
    assert metrics["weight/mean"] == pytest.approx(given.mean().item())
    assert metrics["masked"] == 4 / ROWS
    assert "masked/kappa_nats" not in metrics


def test_nothing_left_is_no_gradient_and_no_loss():
    changes = {"optimizer": "sgd", "trainer.optimizer.weight_decay": 0.0}
    engine, groups = world.moved(correction={"mode": "decoupled", "kappa_nats": 1e-6}, **changes)
    before = world.weights(engine)
    metrics = world.step_on(engine, *groups)
    assert torch.equal(world.weights(engine), before)
    assert (metrics["masked"], metrics["loss"], metrics["grad_norm"]) == (1, 0, 0)
