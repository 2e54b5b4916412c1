"""Tests the loss of every objective on transitions against its formula, row by row in Python numbers. That gradients
are those of the losses is tested for all of them in `test_transition_objectives`."""

import math

import pytest
import torch
from transition_steps import clipped, close, gaussian_steps, inputs, mean_square, ratio_of

from omni_async.algorithms.objectives.dance_grpo import dance_grpo
from omni_async.algorithms.objectives.flow_dppo import flow_dppo
from omni_async.algorithms.objectives.flow_grpo import flow_grpo
from omni_async.algorithms.objectives.grpo_guard import grpo_guard
from omni_async.algorithms.objectives.gspo import gspo
from omni_async.algorithms.objectives.mix_grpo import mix_grpo
from omni_async.config.algorithm import Algorithm, Dppo, Guard, Mix

ROWS = 24
kinds = pytest.mark.parametrize("kind", ["flow", "dance", "cps"])
kl_coefs = pytest.mark.parametrize("kl_coef", [0.0, 0.3])


def example(kind="flow", seed=0, rows=ROWS, **changes):
    """Returns steps and their inputs, each sample with a weight of its own."""
    steps = gaussian_steps(kind, rows=rows, seed=seed, steps_per_sample=changes.get("steps_per_sample", 1))
    number = rows // changes.get("steps_per_sample", 1)
    weight = torch.rand(number, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return steps, steps.inputs(weight=weight.repeat_interleave(rows // number), **changes)


def kl(given, row, exact=False):
    width = (given.scale if exact else given.std)[row].item()
    return mean_square(given.mean[row], given.ref_mean[row]) / (2 * width**2)


def surrogates(given, clip, log_ratios=None):
    """Returns PPO's loss of every row, and how many are held by the clip."""
    ratios = [ratio_of(given, row) for row in range(len(given.advantage))] if log_ratios is None else log_ratios
    rows = [clipped(advantage, ratio, clip) for advantage, ratio in zip(given.advantage.tolist(), ratios, strict=True)]
    held = sum(slope == 0 for _, slope in rows)
    assert 0 < held < len(rows)
    return [loss for loss, _ in rows]


@kinds
@kl_coefs
@pytest.mark.parametrize("exact", [False, True])
def test_flow_grpo_and_mix_grpo_and_dance_grpo(kind, kl_coef, exact):
    clip = 0.002 if kind == "cps" else 0.02
    _, given = example(kind)
    settings = {"clip_range": clip, "kl_form": "exact" if exact else "published"}
    losses = [w * loss for w, loss in zip(given.weight.tolist(), surrogates(given, clip), strict=True)]
    pulls = [kl_coef * kl(given, row, exact) for row in range(ROWS)]
    drifts = [5.0 * math.log(ratio_of(given, row)) ** 2 / 2 for row in range(ROWS)]
    close(
        flow_grpo(given, Algorithm(kl_coef=kl_coef, **settings)).loss,
        [a + b for a, b in zip(losses, pulls, strict=True)],
        1e-10,
    )
    mixed = mix_grpo(given, Algorithm(kl_coef=kl_coef, mix=Mix(log_ratio_coef=5.0), **settings))
    close(mixed.loss, [sum(terms) for terms in zip(losses, pulls, drifts, strict=True)], 1e-10)
    close(dance_grpo(given, Algorithm(**settings)).loss, losses, 1e-10)


def test_dance_grpo_refuses_a_kl_even_with_a_reference():
    with pytest.raises(ValueError, match=r"algorithm\.kl_coef: dance_grpo has no KL term, got 0\.04"):
        dance_grpo(gaussian_steps().inputs(), Algorithm(kl_coef=0.04))


def test_the_default_clip_range_is_flow_grpos():
    given = gaussian_steps(drift=1e-3).inputs()
    assert torch.equal(flow_grpo(given, Algorithm()).loss, flow_grpo(given, Algorithm(clip_range=1e-4)).loss)
    assert 0 < float(flow_grpo(given, Algorithm()).metrics["clipped_high"].sum()) < ROWS


@kl_coefs
@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("scale", ["batch", "sample"])
def test_grpo_guard(scale, divide, kl_coef):
    steps, given = example(seed=4)
    out = grpo_guard(given, Algorithm(clip_range=0.01, kl_coef=kl_coef, guard=Guard(scale=scale, divide=divide)))
    root_h = (steps.sigma - steps.sigma_next).sqrt().tolist()
    std = (steps.noise_level * (steps.sigma / (1 - steps.sigma)).sqrt()).tolist()
    if scale == "batch":
        root_h, std = [sum(root_h) / ROWS] * ROWS, [sum(std) / ROWS] * ROWS
    widths = [a * b for a, b in zip(root_h, std, strict=True)]
    biases = [mean_square(given.mean[row], given.old_mean[row]) / (2 * widths[row] ** 2) for row in range(ROWS)]
    ratios = [(ratio_of(given, row) * math.exp(biases[row])) ** widths[row] for row in range(ROWS)]
    factors = [w / (h**2 if divide else 1) for w, h in zip(given.weight.tolist(), root_h, strict=True)]
    losses = surrogates(given, 0.01, ratios)
    close(out.loss, [factors[row] * losses[row] + kl_coef * kl(given, row) for row in range(ROWS)], 1e-10)
    close(out.metrics["guard_bias"], biases, 1e-10)
    close(out.metrics["ratio_deviation"], [abs(ratio - 1) for ratio in ratios], 1e-10)
    close(out.metrics["approx_kl"], (given.log_prob - given.old_log_prob).detach().square() / 2)


@pytest.mark.parametrize("kind", ["cps", "dance"])
def test_grpo_guard_refuses_other_kinds(kind):
    with pytest.raises(ValueError, match=f"'flow' alone; got '{kind}'"):
        grpo_guard(gaussian_steps(kind).inputs(), Algorithm())


@pytest.mark.parametrize("objective", [grpo_guard, flow_dppo])
def test_missing_old_means_are_refused(objective):
    with pytest.raises(ValueError, match=f"{objective.__name__} needs old_mean"):
        objective(gaussian_steps().inputs(old_mean=None), Algorithm())


@kinds
@kl_coefs
@pytest.mark.parametrize("width", ["transition", "unit"])
def test_flow_dppo(kind, width, kl_coef):
    _, given = example(kind, seed=6, rows=40)
    divisors = [2 * s**2 if width == "transition" else 2.0 for s in given.scale.tolist()]
    kappas = [mean_square(given.mean[row], given.old_mean[row]) / divisors[row] for row in range(40)]
    limit = sorted(kappas)[20] * (1 - 1e-9)
    losses, dropped = [], []
    for row, (advantage, weight) in enumerate(zip(given.advantage.tolist(), given.weight.tolist(), strict=True)):
        ratio = ratio_of(given, row)
        dropped.append(float(kappas[row] >= limit and advantage * (ratio - 1) > 0))
        losses.append((1 - dropped[-1]) * -advantage * ratio * weight + kl_coef * kl(given, row))
    out = flow_dppo(given, Algorithm(kl_coef=kl_coef, dppo=Dppo(kappa_max=limit, width=width)))
    assert 0 < sum(dropped) < 20
    close(out.loss, losses, 1e-10)
    assert out.metrics["dropped"].tolist() == dropped
    assert out.metrics.keys() == {"ratio_deviation", "dropped", "approx_kl", "kl_ref"}


@pytest.mark.parametrize(
    ("dppo", "drops"),
    [
        (Dppo(kappa_max=0.126), False),
        (Dppo(kappa_max=0.124), True),
        (Dppo(kappa_max_nats=6 * 0.126, kappa_max=1e-9), False),
        (Dppo(kappa_max_nats=6 * 0.124, kappa_max=1e9), True),
        (Dppo(kappa_max=0.0051, width="unit"), False),
        (Dppo(kappa_max=0.0049, width="unit"), True),
    ],
)
def test_flow_dppo_drops_rows_beyond_the_limit_only_where_they_move_away(dppo, drops):
    """Takes rows of kappa 0.01 / (2 0.2^2) = 0.125; neither ratio nor advantage is clipped."""
    ratios, advantages = [1.3, 0.7, 1.3, 0.7, 1.0, 1.3], [20.0, 2.0, -2.0, -2.0, 2.0, 0.0]
    given = inputs(ratios, advantages, old_mean=torch.full((6, 2, 3), 0.1, dtype=torch.float64))
    out = flow_dppo(given, Algorithm(dppo=dppo, clip_range=1e-4))
    close(out.loss, [0.0 if drops else -26.0, -1.4, 2.6, 0.0 if drops else 1.4, -2.0, 0.0])
    assert out.metrics["dropped"].tolist() == ([1, 0, 0, 1, 0, 0] if drops else [0] * 6)


def test_flow_dppo_drops_at_the_limit():
    given = inputs([1.3], [1.0], old_mean=torch.full((1, 2, 3), 0.5, dtype=torch.float64))  # 0.5^2 / 2, exactly
    assert flow_dppo(given, Algorithm(dppo=Dppo(kappa_max=0.125, width="unit"))).metrics["dropped"].item() == 1


@kl_coefs
@pytest.mark.parametrize("each", [1, 2, 3])
@pytest.mark.parametrize("kind", ["flow", "dance"])
def test_gspo(kind, each, kl_coef):
    _, given = example(kind, seed=8, steps_per_sample=each)
    samples = [range(first, first + each) for first in range(0, ROWS, each)]
    ratios = [ratio_of(given, *rows) for rows in samples for _ in rows]
    losses = surrogates(given, 0.01, ratios)
    out = gspo(given, Algorithm(clip_range=0.01, kl_coef=kl_coef))
    close(out.loss, [given.weight[row].item() * losses[row] + kl_coef * kl(given, row) for row in range(ROWS)], 1e-10)
    close(out.metrics["ratio_deviation"], [abs(ratio - 1) for ratio in ratios], 1e-10)
    close(out.metrics["approx_kl"], [math.log(ratio_of(given, row)) ** 2 / 2 for row in range(ROWS)], 1e-10)


@pytest.mark.parametrize("kind", ["flow", "cps"])
def test_gspos_clip_range_in_nats_bounds_the_mean_over_steps_of_whole_sample_log_ratios(kind):
    """Counts steps of `cps` by their densities, although their log-probs lack a factor."""
    steps = gaussian_steps(kind, seed=3, steps_per_sample=3)
    given = steps.inputs(steps_per_sample=3)
    distances = [(steps.x_next - mean).detach().square().flatten(1).sum(1) for mean in (given.old_mean, given.mean)]
    nats = ((distances[0] - distances[1]) / (2 * given.scale**2)).tolist()
    losses, held = [], 0
    for first in range(0, ROWS, 3):
        rows = range(first, first + 3)
        average, advantage = math.fsum(nats[row] for row in rows) / 3, given.advantage[first].item()
        outside = abs(average) > 0.2 and advantage * average > 0
        held += outside
        log_ratio = math.log(ratio_of(given, *rows)) * (0.2 / abs(average) if outside else 1)
        losses += [-advantage * math.exp(log_ratio)] * 3
    assert 0 < held < 8
    close(gspo(given, Algorithm(clip_range_nats=0.2)).loss, losses, 1e-10)
