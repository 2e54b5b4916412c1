import pytest
import torch
from transition_steps import clipped, close, gaussian_steps, losses_and_gradient, ratio_of

from omni_async.algorithms.objectives.dance_grpo import dance_grpo
from omni_async.config.algorithm import Algorithm


@pytest.mark.parametrize(("kind", "clip"), [("dance", 0.02), ("flow", 0.02), ("cps", 0.002)])
def test_loss_and_velocity_gradient_are_the_surrogates_alone(kind, clip):
    steps = gaussian_steps(kind, seed=1)
    given = steps.inputs(ref_mean=None)
    out, gradient = losses_and_gradient(steps, given, dance_grpo, Algorithm(clip_range=clip))
    rows = [clipped(advantage, ratio_of(given, row), clip) for row, advantage in enumerate(given.advantage.tolist())]
    assert 0 < sum(slope == 0 for _, slope in rows) < len(rows)
    close(out.loss, [loss for loss, _ in rows], 1e-10)
    close(
        gradient,
        torch.stack([slope * steps.log_prob_gradient(row, given) for row, (_, slope) in enumerate(rows)]),
        1e-10,
    )
    assert out.metrics.keys() == {"ratio_deviation", "clipped_low", "clipped_high", "approx_kl"}


def test_a_kl_is_refused_even_with_a_reference():
    with pytest.raises(ValueError, match=r"algorithm\.kl_coef: dance_grpo has no KL term, got 0\.04"):
        dance_grpo(gaussian_steps().inputs(), Algorithm(kl_coef=0.04))
