import math

import pytest
import torch
from hypothesis import given as over
from hypothesis import settings
from hypothesis import strategies as st
from transition_steps import clipped, close, gaussian_steps, inputs

from omni_async.algorithms.objectives.flow_grpo import flow_grpo
from omni_async.algorithms.objectives.surrogate import (
    clipped_surrogate,
    log_ratios,
    log_ratios_nats,
    objective_output,
    reference_kl,
)
from omni_async.config.algorithm import Algorithm
from omni_async.sde.transitions import log_prob, nats_per_log_prob, transition

SETTINGS = Algorithm(clip_range=0.1)


def surrogate(given, algorithm=SETTINGS):
    return clipped_surrogate(given, algorithm, log_ratios(given), log_ratios_nats(given))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_the_clipped_surrogate_and_its_gradient_by_hand(dtype, tolerance):
    given = inputs([1.05, 1.3, 0.7, 1.3, 0.7, 1.0], [2.0, 2.0, 2.0, -2.0, -2.0, 0.0], dtype)
    loss, metrics = surrogate(given)
    assert loss.dtype == torch.float64
    close(loss, [-2.1, -2.2, -1.4, 2.6, 1.8, 0.0], tolerance)
    loss.sum().backward()
    close(given.log_prob.grad, [-2.1, 0.0, -1.4, 2.6, 0.0, 0.0], tolerance)  # -A r, and 0 where the clip holds
    assert metrics["clipped_high"].tolist() == [0, 1, 0, 1, 0, 0]
    assert metrics["clipped_low"].tolist() == [0, 0, 1, 0, 1, 0]
    close(metrics["ratio_deviation"], [0.05, 0.3, 0.3, 0.3, 0.3, 0.0], tolerance)


@over(
    rows=st.lists(st.tuples(st.floats(-0.5, 0.5), st.floats(-5, 5)), min_size=1, max_size=8),
    clip=st.floats(1e-6, 0.3),
)
@settings(max_examples=60, deadline=None)
def test_the_clipped_surrogate_is_ppos_row_by_row(rows, clip):
    given = inputs([math.exp(d) for d, _ in rows], [a for _, a in rows])
    loss, _ = surrogate(given, Algorithm(clip_range=clip))
    ratios = given.log_prob.detach().exp().tolist()
    close(loss, [clipped(a, r, clip)[0] for r, (_, a) in zip(ratios, rows, strict=True)])


def test_tiny_clip_ranges_work_in_float32():
    given = inputs([1.0, 1.0], [1.0, 1.0], torch.float32, log_prob=torch.tensor([0.9e-6, 1.1e-6]))
    assert surrogate(given, Algorithm(clip_range=1e-6))[1]["clipped_high"].tolist() == [0, 1]


@pytest.mark.parametrize("sigma_next", [0.95, 0.7, 0.4, 0.1])
@pytest.mark.parametrize("kind", ["flow", "dance", "cps"])
def test_one_nat_binds_at_one_nat_for_every_transition_and_step(kind, sigma_next):
    """Sets x' = old mean + a and mean = old mean + t a, which make L = (|a|^2 / 2 S^2) (1 - (1 - t)^2), so t says where
    a row is; |a|^2 / 2 S^2 = 5."""
    wanted = torch.tensor([1 - 1e-9, 1 + 1e-9, -1 + 1e-9, -1 - 1e-9] * 2, dtype=torch.float64)
    advantage = torch.tensor([1.0] * 4 + [-1.0] * 4, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    x, v, away = torch.randn(3, 8, 3, 4, generator=generator, dtype=torch.float64)
    sigma_next = torch.full((8,), sigma_next, dtype=torch.float64)
    step = transition(
        kind, x, v, sigma_next + 0.04, sigma_next, torch.full_like(sigma_next, 0.97), torch.full_like(sigma_next, 0.8)
    )
    away *= (10 * step.scale.square() / away.square().sum(dim=(1, 2))).sqrt()[:, None, None]
    mean = (step.mean + (1 - (1 - wanted / 5).sqrt())[:, None, None] * away).requires_grad_()
    given = inputs(
        [1.0] * 8,
        advantage.tolist(),
        log_prob=log_prob(kind, step.mean + away, mean, step.scale),
        old_log_prob=log_prob(kind, step.mean + away, step.mean, step.scale),
        mean=mean,
        scale=step.scale,
        nats_per_log_prob=nats_per_log_prob(kind, step.scale, 12),
        num_elements=12,
        kind=kind,
    )
    out = flow_grpo(given, Algorithm(clip_range_nats=1.0))
    assert out.metrics["clipped_high"].tolist() == [0, 1, 0, 0] * 2
    assert out.metrics["clipped_low"].tolist() == [0, 0, 0, 1] * 2
    out.loss.sum().backward()
    moves = mean.grad.abs().amax(dim=(1, 2)) > 0
    assert moves.tolist() == [True, False, True, True, True, True, True, False]


def test_a_clip_range_is_given_once_and_in_nats_only_where_the_log_ratio_is_one_of_densities():
    given = inputs([1.0], [1.0])
    with pytest.raises(ValueError, match=r"not both \(got 0.0001 and 0.5\)"):
        surrogate(given, Algorithm(clip_range=1e-4, clip_range_nats=0.5))
    with pytest.raises(ValueError, match=r"clip_range_nats: the ratio of grpo_guard is rescaled.*use clip_range"):
        clipped_surrogate(given, Algorithm(name="grpo_guard", clip_range_nats=0.5), log_ratios(given), None)


@pytest.mark.parametrize(("form", "divisor"), [("published", 2 * 0.5**2), ("exact", 2 * 0.2**2), ("mean", 1.0)])
def test_each_kl_form_by_hand_and_its_pull_to_the_reference(form, divisor):
    mean = torch.full((1, 2, 3), 0.3, dtype=torch.float64, requires_grad=True)
    ref = torch.full((1, 2, 3), 0.1, dtype=torch.float64, requires_grad=True)
    given = inputs([1.0], [0.0], mean=mean, ref_mean=ref)
    out = objective_output(given, Algorithm(kl_coef=0.5, kl_form=form), torch.zeros(1, dtype=torch.float64), {})
    close(out.loss, [0.5 * 0.04 / divisor])
    close(out.metrics["kl_ref"], [0.04 / divisor])
    out.loss.sum().backward()
    close(mean.grad, torch.full_like(mean, 0.5 * 2 * 0.2 / (divisor * 6)))
    assert ref.grad is None


def test_the_exact_kl_is_torchs_gaussian_divergence_per_element():
    steps = gaussian_steps("dance")
    given = steps.inputs()
    normal = torch.distributions.Normal
    scale = given.scale[:, None, None]
    expected = torch.distributions.kl_divergence(normal(given.mean, scale), normal(given.ref_mean, scale)).mean(
        dim=(1, 2)
    )
    torch.testing.assert_close(
        reference_kl(given, given.ref_mean, Algorithm(kl_form="exact")), expected, atol=1e-12, rtol=1e-10
    )


@pytest.mark.parametrize("kind", ["flow", "dance", "cps"])
def test_the_published_kl_is_the_exact_one_times_the_step_size_for_flow_alone(kind):
    steps = gaussian_steps(kind)
    given = steps.inputs()
    published, exact = (reference_kl(given, given.ref_mean, Algorithm(kl_form=form)) for form in ("published", "exact"))
    factor = steps.sigma - steps.sigma_next if kind == "flow" else 1.0
    close(published, exact * factor, 1e-10)


def test_the_weight_multiplies_the_policy_loss_and_nothing_else():
    ref = torch.full((3, 2, 3), 0.1, dtype=torch.float64)
    weight = torch.tensor([0.0, 0.5, 2.0], dtype=torch.float64, requires_grad=True)
    given = inputs([1.0] * 3, [0.0] * 3, ref_mean=ref, weight=weight)
    policy = torch.tensor([7.0, 8.0, 9.0], dtype=torch.float64, requires_grad=True)
    penalty = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    out = objective_output(given, Algorithm(kl_coef=10.0, kl_form="mean"), policy, {}, penalty)
    close(out.loss, [0.0 + 0.1 + 1.0, 4.0 + 0.1 + 2.0, 18.0 + 0.1 + 3.0])
    out.loss.sum().backward()
    close(policy.grad, [0.0, 0.5, 2.0])
    assert weight.grad is None


def test_metrics_by_hand_and_detached():
    mean = torch.zeros(2, 2, 3, dtype=torch.float64, requires_grad=True)
    given = inputs([1.2, 0.9], [1.0, 1.0], mean=mean, ref_mean=torch.full((2, 2, 3), 0.1, dtype=torch.float64))
    out = objective_output(given, Algorithm(kl_coef=0.1), *surrogate(given))
    close(out.metrics["approx_kl"], [math.log(1.2) ** 2 / 2, math.log(0.9) ** 2 / 2])
    close(out.metrics["kl_ref"], [0.01 / (2 * 0.25)] * 2)
    assert out.metrics.keys() == {"ratio_deviation", "clipped_low", "clipped_high", "approx_kl", "kl_ref"}
    assert all(value.shape == (2,) and not value.requires_grad for value in out.metrics.values())


def test_a_kl_without_reference_is_refused():
    given = inputs([1.0], [1.0])
    assert "kl_ref" not in objective_output(given, SETTINGS, *surrogate(given)).metrics
    with pytest.raises(ValueError, match=r"kl_coef is 0\.04 but there is no ref_mean"):
        objective_output(given, Algorithm(kl_coef=0.04), *surrogate(given))
