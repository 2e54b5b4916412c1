import pytest
import torch
from transition_steps import D, close, gaussian_steps, inputs, losses_and_gradient, mean_square, ratio_of

from omni_async.algorithms.objectives.flow_dppo import flow_dppo
from omni_async.config.algorithm import Algorithm, Dppo


@pytest.mark.parametrize("kind", ["flow", "dance", "cps"])
@pytest.mark.parametrize("width", ["transition", "unit"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_loss_and_velocity_gradient_on_gaussian_steps(kind, width, kl_coef):
    steps = gaussian_steps(kind, rows=40, seed=6)
    weight = torch.rand(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = steps.inputs(weight=weight)
    kappas = []
    for row in range(40):
        divisor = 2 * float(given.scale[row]) ** 2 if width == "transition" else 2.0
        kappas.append(mean_square(given.mean[row], given.old_mean[row]) / divisor)
    limit = sorted(kappas)[20] * (1 - 1e-9)
    algorithm = Algorithm(kl_coef=kl_coef, dppo=Dppo(kappa_max=limit, width=width))
    out, gradient = losses_and_gradient(steps, given, flow_dppo, algorithm)
    losses, gradients, dropped = [], [], []
    for row in range(40):
        advantage = float(given.advantage[row])
        ratio = ratio_of(given, row)
        away = (advantage > 0 and ratio > 1) or (advantage < 0 and ratio < 1)
        dropped.append(float(kappas[row] >= limit and away))
        slope = 0.0 if dropped[-1] else -advantage * ratio * float(weight[row])
        divisor = 2 * float(given.std[row]) ** 2
        losses.append(slope + kl_coef * mean_square(given.mean[row], given.ref_mean[row]) / divisor)
        kl_gradient = steps.square_gradient(row, given, given.ref_mean) / divisor
        gradients.append(slope * steps.log_prob_gradient(row, given) + kl_coef * kl_gradient)
    assert 0 < sum(dropped) < 20
    close(out.loss, losses, 1e-10)
    close(gradient, torch.stack(gradients), 1e-10)
    assert out.metrics["dropped"].tolist() == dropped
    assert out.metrics.keys() == {"ratio_deviation", "dropped", "approx_kl", "kl_ref"}


def drifted(ratios, advantages):
    """Makes rows of kappa 0.01 / (2 0.2^2) = 0.125."""
    return inputs(ratios, advantages, old_mean=torch.full((len(ratios), 2, 3), 0.1, dtype=torch.float64))


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
def test_rows_beyond_the_limit_are_dropped_only_where_they_move_away(dppo, drops):
    given = drifted([1.3, 0.7, 1.3, 0.7, 1.0, 1.3], [2.0, 2.0, -2.0, -2.0, 2.0, 0.0])
    out = flow_dppo(given, Algorithm(dppo=dppo))
    kept = 0.0 if drops else 1.0
    close(out.loss, [-2.6 * kept, -1.4, 2.6, 1.4 * kept, -2.0, 0.0])
    assert out.metrics["dropped"].tolist() == ([1, 0, 0, 1, 0, 0] if drops else [0] * 6)
    out.loss.sum().backward()
    close(given.log_prob.grad, [-2.6 * kept, -1.4, 2.6, 1.4 * kept, -2.0, 0.0])


def test_drift_at_the_limit_is_beyond_it():
    given = inputs([1.3], [1.0], old_mean=torch.full((1, 2, 3), 0.5, dtype=torch.float64))
    assert (
        flow_dppo(given, Algorithm(dppo=Dppo(kappa_max=0.125, width="unit"))).metrics["dropped"].item() == 1
    )  # 0.5^2 / 2, exactly


def test_neither_the_ratio_nor_the_advantage_is_clipped():
    out = flow_dppo(drifted([30.0], [50.0]), Algorithm(clip_range=1e-4, dppo=Dppo(kappa_max=1.0)))
    close(out.loss, [-1500.0], 1e-9)


def test_kappa_is_the_kl_of_the_whole_sample_in_nats():
    given = gaussian_steps("dance", rows=1, seed=7).inputs()
    normal = torch.distributions.Normal
    scale = given.scale.item()
    kl = torch.distributions.kl_divergence(normal(given.mean, scale), normal(given.old_mean, scale)).sum().item()
    assert D * mean_square(given.mean, given.old_mean) / (2 * scale**2) == pytest.approx(kl)
    sign = 1.0 if given.log_prob > given.old_log_prob else -1.0
    for factor, drops in ((1.01, 0), (0.99, 1)):
        moving_away = gaussian_steps("dance", rows=1, seed=7).inputs(
            advantage=torch.tensor([sign], dtype=torch.float64)
        )
        out = flow_dppo(moving_away, Algorithm(dppo=Dppo(kappa_max_nats=kl * factor)))
        assert out.metrics["dropped"].item() == drops


def test_missing_old_means_are_refused():
    with pytest.raises(ValueError, match="flow_dppo needs old_mean"):
        flow_dppo(gaussian_steps().inputs(old_mean=None), Algorithm())
