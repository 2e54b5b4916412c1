import math

import pytest
import torch
from transition_steps import clipped, close, gaussian_steps, losses_and_gradient, mean_square, ratio_of

from omni_async.algorithms.objectives.mix_grpo import mix_grpo
from omni_async.config.algorithm import Algorithm, Mix


@pytest.mark.parametrize("kind", ["flow", "dance"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("mix_coef", [0.0, 5.0])
def test_loss_and_velocity_gradient_on_gaussian_steps(kind, kl_coef, mix_coef):
    steps = gaussian_steps(kind, seed=2)
    weight = torch.rand(24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = steps.inputs(weight=weight)
    algorithm = Algorithm(clip_range=0.02, kl_coef=kl_coef, mix=Mix(log_ratio_coef=mix_coef))
    out, gradient = losses_and_gradient(steps, given, mix_grpo, algorithm)
    losses, gradients = [], []
    for row in range(24):
        delta = math.log(ratio_of(given, row))
        loss, slope = clipped(float(given.advantage[row]), ratio_of(given, row), 0.02)
        w, divisor = float(weight[row]), 2 * float(given.std[row]) ** 2
        kl = mean_square(given.mean[row], given.ref_mean[row]) / divisor
        losses.append(w * loss + mix_coef * delta**2 / 2 + kl_coef * kl)
        gradients.append(
            (w * slope + mix_coef * delta) * steps.log_prob_gradient(row, given)
            + kl_coef * steps.square_gradient(row, given, given.ref_mean) / divisor
        )
    close(out.loss, losses, 1e-10)
    close(gradient, torch.stack(gradients), 1e-10)


def test_the_log_ratio_term_pulls_a_clipped_row_back_to_the_old_policy():
    steps = gaussian_steps(seed=3)
    given = steps.inputs(advantage=torch.zeros(24, dtype=torch.float64))
    before = (given.log_prob - given.old_log_prob).detach()
    _, gradient = losses_and_gradient(steps, given, mix_grpo, Algorithm(mix=Mix(log_ratio_coef=1.0)))
    with torch.no_grad():
        steps.velocity -= 0.1 * gradient
    given = steps.inputs()
    assert ((given.log_prob - given.old_log_prob).abs() < before.abs()).all()
