import math

import pytest
import torch
from transition_steps import clipped, close, gaussian_steps, inputs, losses_and_gradient, mean_square, ratio_of

from omni_async.algorithms.objectives.flow_grpo import flow_grpo
from omni_async.algorithms.objectives.gspo import gspo
from omni_async.config.algorithm import Algorithm

CLIP = 0.01


@pytest.mark.parametrize("kind", ["flow", "dance"])
@pytest.mark.parametrize("steps_per_sample", [1, 2, 3])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_the_mean_over_rows_is_the_mean_over_samples_in_value_and_gradient(kind, steps_per_sample, kl_coef):
    steps = gaussian_steps(kind, seed=8, steps_per_sample=steps_per_sample)
    num_samples = 24 // steps_per_sample
    weight = torch.rand(num_samples, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = steps.inputs(weight=weight.repeat_interleave(steps_per_sample), steps_per_sample=steps_per_sample)
    out = gspo(given, Algorithm(clip_range=CLIP, kl_coef=kl_coef))
    (gradient,) = torch.autograd.grad(out.loss.mean(), steps.velocity)

    total, gradients, held = 0.0, [], 0
    for sample in range(num_samples):
        rows = range(sample * steps_per_sample, (sample + 1) * steps_per_sample)
        ratio = ratio_of(given, *rows)
        loss, slope = clipped(float(given.advantage[rows[0]]), ratio, CLIP)
        held += slope == 0
        total += float(weight[sample]) * loss
        for row in rows:
            divisor = 2 * float(given.std[row]) ** 2
            total += kl_coef * mean_square(given.mean[row], given.ref_mean[row]) / divisor / steps_per_sample
            own = float(weight[sample]) * slope * steps.log_prob_gradient(row, given)
            kl_gradient = steps.square_gradient(row, given, given.ref_mean) / divisor
            gradients.append((own + kl_coef * kl_gradient) / (steps_per_sample * num_samples))
    assert 0 < held < num_samples
    close(out.loss.mean(), total / num_samples, 1e-10)
    close(gradient, torch.stack(gradients), 1e-10)


def test_rows_of_a_sample_carry_its_loss_and_ratio_by_hand():
    given = inputs([1.2, 1.2**-1, 1.3, 1.1], [2.0, 2.0, 3.0, 3.0], steps_per_sample=2)
    out = gspo(given, Algorithm(clip_range=0.1))
    geometric = math.sqrt(1.3 * 1.1)
    close(out.loss, [-2.0, -2.0, -3.3, -3.3])
    close(out.metrics["ratio_deviation"], [0.0, 0.0, geometric - 1, geometric - 1])
    assert out.metrics["clipped_high"].tolist() == [0, 0, 1, 1]
    close(out.metrics["approx_kl"], [math.log(r) ** 2 / 2 for r in (1.2, 1.2, 1.3, 1.1)])


def test_a_rows_weight_multiplies_its_own_copy():
    weight = torch.tensor([0.0, 2.0], dtype=torch.float64)
    given = inputs([1.05, 1.0], [1.0, 1.0], steps_per_sample=2, weight=weight)
    out = gspo(given, Algorithm(clip_range=0.1))
    ratio = math.sqrt(1.05)
    close(out.loss, [0.0, -2 * ratio])
    out.loss.mean().backward()
    close(given.log_prob.grad, [-ratio / 2, -ratio / 2])  # both steps, through the ratio they share


def test_one_step_per_sample_is_flow_grpo():
    steps = gaussian_steps(seed=9)
    algorithm = Algorithm(clip_range=CLIP, kl_coef=0.1)
    ours, gradient = losses_and_gradient(steps, steps.inputs(), gspo, algorithm)
    theirs, expected = losses_and_gradient(steps, steps.inputs(), flow_grpo, algorithm)
    assert torch.equal(ours.loss, theirs.loss)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("kind", ["flow", "cps"])
def test_the_clip_range_in_nats_bounds_the_mean_over_steps_of_whole_sample_log_ratios(kind):
    """Counts steps of `cps` by their densities, although their log-probs lack a factor."""
    steps = gaussian_steps(kind, seed=3, steps_per_sample=3)
    given = steps.inputs(steps_per_sample=3)
    out = gspo(given, Algorithm(clip_range_nats=0.2))
    (gradient,) = torch.autograd.grad(out.loss.sum(), steps.velocity)
    held = 0
    for first in range(0, 24, 3):
        rows = range(first, first + 3)
        nats = []
        for row in rows:
            squares = [
                (steps.x_next[row] - mean[row]).detach().square().sum().item() for mean in (given.old_mean, given.mean)
            ]
            nats.append((squares[0] - squares[1]) / (2 * given.scale[row].item() ** 2))
        average, advantage = math.fsum(nats) / 3, given.advantage[first].item()
        clipped_here = abs(average) > 0.2 and advantage * average > 0
        held += clipped_here
        log_ratio = math.log(ratio_of(given, *rows))
        loss = -advantage * math.exp(log_ratio * 0.2 / abs(average) if clipped_here else log_ratio)
        for row in rows:
            assert out.loss[row].item() == pytest.approx(loss, rel=1e-10)
            assert out.metrics["clipped_high"][row] == (average > 0.2)
            close(gradient[row], steps.log_prob_gradient(row, given) * (0.0 if clipped_here else loss), 1e-10)
    assert 0 < held < 8


def test_a_step_beyond_the_clip_range_is_kept_where_the_sample_is_inside():
    given = inputs([1.3, 1 / 1.3], [1.0, 1.0], steps_per_sample=2)
    gspo(given, Algorithm(clip_range=0.1)).loss.mean().backward()
    close(given.log_prob.grad, [-0.5, -0.5])
