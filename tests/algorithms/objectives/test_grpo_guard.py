import math
from dataclasses import replace

import pytest
import torch
from transition_steps import clipped, close, gaussian_steps, inputs, losses_and_gradient, mean_square, ratio_of

from omni_async.algorithms.objectives.grpo_guard import grpo_guard
from omni_async.config.algorithm import Algorithm, Guard
from omni_async.sde.transitions import log_prob, take_step, transition

CLIP = 0.01


@pytest.mark.parametrize("scale", ["batch", "sample"])
@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_loss_and_velocity_gradient_on_gaussian_steps(scale, divide, kl_coef):
    steps = gaussian_steps(seed=4)
    weight = torch.rand(24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = steps.inputs(weight=weight)
    algorithm = Algorithm(clip_range=CLIP, kl_coef=kl_coef, guard=Guard(scale=scale, divide=divide))
    out, gradient = losses_and_gradient(steps, given, grpo_guard, algorithm)

    root_h = [math.sqrt(float(a - b)) for a, b in zip(steps.sigma, steps.sigma_next, strict=True)]
    std = [
        float(n) * math.sqrt(float(s) / (1 - float(s)))
        for n, s in zip(steps.noise_level.tolist(), steps.sigma.tolist(), strict=True)
    ]
    if scale == "batch":
        root_h, std = [sum(root_h) / 24] * 24, [sum(std) / 24] * 24
    losses, gradients, ratios, biases = [], [], [], []
    for row in range(24):
        width = root_h[row] * std[row]
        biases.append(mean_square(given.mean[row], given.old_mean[row]) / (2 * width**2))
        ratios.append((ratio_of(given, row) * math.exp(biases[-1])) ** width)
        loss, slope = clipped(float(given.advantage[row]), ratios[-1], CLIP)
        factor = float(weight[row]) / (root_h[row] ** 2 if divide else 1)
        own_std = float(given.std[row])
        losses.append(factor * loss + kl_coef * mean_square(given.mean[row], given.ref_mean[row]) / (2 * own_std**2))
        inner = steps.log_prob_gradient(row, given) + steps.square_gradient(row, given, given.old_mean) / (2 * width**2)
        kl_gradient = steps.square_gradient(row, given, given.ref_mean) / (2 * own_std**2)
        gradients.append(factor * slope * width * inner + kl_coef * kl_gradient)
    outside = sum(abs(ratio - 1) > CLIP for ratio in ratios)
    assert 0 < outside < 24
    close(out.loss, losses, 1e-10)
    close(gradient, torch.stack(gradients), 1e-10)
    close(out.metrics["guard_bias"], biases, 1e-10)
    close(out.metrics["ratio_deviation"], [abs(ratio - 1) for ratio in ratios], 1e-10)
    assert out.metrics["clipped_low"].sum() + out.metrics["clipped_high"].sum() == outside
    close(out.metrics["approx_kl"], (given.log_prob - given.old_log_prob).detach().square() / 2)


@pytest.mark.parametrize("scale", ["batch", "sample"])
def test_the_bias_is_each_rows_own(scale):
    mean = torch.zeros(2, 2, 3, dtype=torch.float64)
    old = torch.stack([torch.full((2, 3), 0.1, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)])
    out = grpo_guard(
        inputs([1.0, 1.0], [1.0, 1.0], mean=mean, old_mean=old), Algorithm(clip_range=0.5, guard=Guard(scale=scale))
    )
    close(out.metrics["guard_bias"], [0.01 / (2 * 0.04), 0.0])
    close(out.loss, [-math.exp(0.125 * 0.2) / 0.16, -1 / 0.16])  # sqrt(h) = 0.2 / 0.5


def test_one_step_in_the_batch_makes_both_scales_the_same():
    given = inputs([1.2, 0.9], [1.0, -1.0], old_mean=torch.full((2, 2, 3), 0.1, dtype=torch.float64))
    batch, sample = (
        grpo_guard(given, Algorithm(clip_range=0.1, guard=Guard(scale=scale))).loss for scale in ("batch", "sample")
    )
    close(batch, sample)


def test_the_batch_scale_depends_on_the_other_rows_and_the_sample_scale_does_not():
    given = gaussian_steps(seed=5).inputs()
    rows = ("log_prob", "old_log_prob", "advantage", "mean", "old_mean", "std", "scale", "nats_per_log_prob")
    first = replace(given, **{name: getattr(given, name)[:1] for name in rows}, ref_mean=None)
    for scale, same in (("batch", False), ("sample", True)):
        algorithm = Algorithm(clip_range=CLIP, guard=Guard(scale=scale))
        assert torch.equal(grpo_guard(given, algorithm).loss[:1], grpo_guard(first, algorithm).loss) is same


def test_guarded_log_ratios_are_centred_and_equally_wide_at_every_step():
    """Expects, over the noise of the old policy, mean 0, and the standard deviation of <drift of the mean times eps>,
    without a factor 1 / S."""
    draws = 4000
    generator = torch.Generator().manual_seed(0)
    x, v, shift = torch.randn(3, 1, 3, 4, generator=generator, dtype=torch.float64)
    for sigma, sigma_next in ((0.95, 0.9), (0.3, 0.2)):
        s, s_next, n, top = (
            torch.full((draws,), number, dtype=torch.float64) for number in (sigma, sigma_next, 0.7, 0.97)
        )
        rows = [t.expand(draws, 3, 4) for t in (x, v)]
        noise = torch.randn(draws, 3, 4, generator=generator, dtype=torch.float64)
        x_next, old_log_prob, old_mean = take_step("flow", *rows, s, s_next, top, n, noise)
        step = transition("flow", *rows, s, s_next, top, n)
        mean = old_mean + 0.1 * shift
        given = inputs(
            [1.0] * draws, [1.0] * draws, mean=mean, old_mean=old_mean, std=step.std, scale=step.scale, num_elements=12
        )
        given = replace(given, log_prob=log_prob("flow", x_next, mean, step.scale), old_log_prob=old_log_prob)
        out = grpo_guard(given, Algorithm(clip_range=10.0, guard=Guard(divide=False)))
        guarded = (-out.loss).log()
        width = 0.1 * float(shift.square().sum().sqrt()) / 12
        assert abs(float(guarded.mean())) < 4 * width / math.sqrt(draws)
        assert float(guarded.std()) == pytest.approx(width, rel=0.05)


@pytest.mark.parametrize("kind", ["cps", "dance"])
def test_other_kinds_are_refused(kind):
    with pytest.raises(ValueError, match=f"'flow' alone; got '{kind}'"):
        grpo_guard(gaussian_steps(kind).inputs(), Algorithm())


def test_missing_old_means_are_refused():
    with pytest.raises(ValueError, match="grpo_guard needs old_mean"):
        grpo_guard(gaussian_steps().inputs(old_mean=None), Algorithm())
