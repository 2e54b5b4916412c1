import math

import pytest
import torch
from transition_steps import D, clipped, close, gaussian_steps, losses_and_gradient, mean_square, ratio_of

from omni_async.algorithms.objectives.flow_grpo import flow_grpo
from omni_async.config.algorithm import Algorithm

CLIPS = {"flow": 0.02, "dance": 0.02, "cps": 0.002}


def expected(steps, given, clip, kl_coef=0.0, exact=False):
    """Computes loss and gradient with respect to the velocity, a row at a time."""
    losses, gradients, held = [], [], 0
    for row in range(len(given.advantage)):
        ratio = ratio_of(given, row)
        loss, slope = clipped(float(given.advantage[row]), ratio, clip)
        held += slope == 0
        divisor = 2 * float((given.scale if exact else given.std)[row]) ** 2
        losses.append(loss + kl_coef * mean_square(given.mean[row], given.ref_mean[row]) / divisor)
        kl_gradient = steps.square_gradient(row, given, given.ref_mean) / divisor
        gradients.append(slope * steps.log_prob_gradient(row, given) + kl_coef * kl_gradient)
    assert 0 < held < len(losses)
    return losses, torch.stack(gradients)


@pytest.mark.parametrize("kind", ["flow", "dance", "cps"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("exact", [False, True])
def test_loss_and_velocity_gradient_on_gaussian_steps(kind, kl_coef, exact):
    steps = gaussian_steps(kind)
    given = steps.inputs()
    algorithm = Algorithm(clip_range=CLIPS[kind], kl_coef=kl_coef, kl_form="exact" if exact else "published")
    out, gradient = losses_and_gradient(steps, given, flow_grpo, algorithm)
    losses, gradients = expected(steps, given, CLIPS[kind], kl_coef, exact)
    close(out.loss, losses, 1e-10)
    close(gradient, gradients, 1e-10)


def test_on_policy_the_gradient_is_the_advantage_times_that_of_the_log_prob():
    steps = gaussian_steps(drift=0.0)
    given = steps.inputs()
    _, gradient = losses_and_gradient(steps, given, flow_grpo, Algorithm())
    close(
        gradient, torch.stack([-given.advantage[row] * steps.log_prob_gradient(row, given) for row in range(24)]), 1e-10
    )


@pytest.mark.parametrize("kind", ["flow", "dance", "cps"])
def test_the_clip_range_in_nats_is_that_of_the_whole_sample(kind):
    """Computes losses and gradients from densities of the whole sample: L = sum over elements of ((x' - old mean)^2 -
    (x' - mean)^2) / (2 S^2)."""
    steps = gaussian_steps(kind)
    given = steps.inputs()
    out, gradient = losses_and_gradient(steps, given, flow_grpo, Algorithm(clip_range_nats=0.24))
    losses, gradients, held = [], [], 0
    for row in range(24):
        squares = [
            (steps.x_next[row] - mean[row]).detach().square().sum().item() for mean in (given.old_mean, given.mean)
        ]
        scale, advantage = given.scale[row].item(), given.advantage[row].item()
        nats = (squares[0] - squares[1]) / (2 * scale**2)
        log_ratio = nats * (2 * scale**2 if kind == "cps" else 1.0) / D
        clipped = advantage * nats > 0 and abs(nats) > 0.24
        held += clipped
        losses.append(-advantage * math.exp(log_ratio * 0.24 / abs(nats) if clipped else log_ratio))
        gradients.append(steps.log_prob_gradient(row, given) * (0.0 if clipped else losses[-1]))
    assert 0 < held < 24
    close(out.loss, losses, 1e-10)
    close(gradient, torch.stack(gradients), 1e-10)


def test_the_default_clip_range_is_flow_grpos():
    steps = gaussian_steps(drift=1e-3)
    assert torch.equal(
        flow_grpo(steps.inputs(), Algorithm()).loss, flow_grpo(steps.inputs(), Algorithm(clip_range=1e-4)).loss
    )
    assert 0 < float(flow_grpo(steps.inputs(), Algorithm()).metrics["clipped_high"].sum()) < 24
