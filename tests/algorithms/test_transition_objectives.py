"""Tests the common properties of every objective on transitions."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given as over
from hypothesis import settings
from hypothesis import strategies as st
from msgspec.structs import replace as changed
from transition_steps import close, gaussian_steps

from omni_async.algorithms.advantages import centred, global_scale, unclipped_advantages
from omni_async.algorithms.objectives.base import TransitionInputs
from omni_async.algorithms.registry import BUILT_IN, find_objective
from omni_async.config.algorithm import Advantage, Algorithm, Dppo, Guard, Mix
from omni_async.sde.transitions import log_prob, take_step, transition

CASES = {
    "flow_grpo": Algorithm(name="flow_grpo", clip_range=0.02),
    "flow_grpo/nats": Algorithm(name="flow_grpo", clip_range_nats=0.3),
    "dance_grpo": Algorithm(name="dance_grpo", clip_range=0.02),
    "mix_grpo": Algorithm(name="mix_grpo", clip_range=0.02),
    "grpo_guard/batch": Algorithm(name="grpo_guard", clip_range=0.01),
    "grpo_guard/sample": Algorithm(name="grpo_guard", clip_range=0.01, guard=Guard(scale="sample", divide=False)),
    "flow_dppo": Algorithm(name="flow_dppo", dppo=Dppo(kappa_max=0.01)),
    "gspo": Algorithm(name="gspo", clip_range=0.01),
    "gspo/nats": Algorithm(name="gspo", clip_range_nats=0.12),
}
WITH_KL = sorted(CASES.keys() - {"dance_grpo"})


def example(rows=24, **changes):
    """Makes samples of two steps."""
    steps = gaussian_steps(rows=rows, seed=11, steps_per_sample=2)
    return steps, steps.inputs(steps_per_sample=2, **changes)


def compute(algorithm):
    return find_objective(algorithm.name).load()


def loss_and_gradient(steps, algorithm, **changes):
    """Returns the losses, and the gradient of their sum with respect to the velocity."""
    loss = compute(algorithm)(steps.inputs(steps_per_sample=2, **changes), algorithm).loss
    return loss, torch.autograd.grad(loss.sum(), steps.velocity)[0]


def with_kl(case):
    return changed(CASES[case], kl_coef=0.1 if case in WITH_KL else 0.0)


def tensors(given, dtype=torch.float64):
    """Returns every tensor of the inputs by name, cut off from the graph."""
    values = {field.name: getattr(given, field.name) for field in fields(given)}
    return {name: value.detach().to(dtype) for name, value in values.items() if isinstance(value, torch.Tensor)}


def test_every_transition_objective_is_covered_here():
    assert {o.name for o in BUILT_IN if o.kind == "transition"} == {algorithm.name for algorithm in CASES.values()}


@pytest.mark.parametrize("case", CASES)
def test_the_cases_reach_both_sides_of_their_trust_region(case):
    metrics = compute(CASES[case])(example()[1], CASES[case]).metrics
    beyond = metrics["dropped"] if "dropped" in metrics else metrics["clipped_low"] + metrics["clipped_high"]
    assert 0 < beyond.sum() < len(beyond)


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_with_respect_to_log_prob_and_mean_is_the_numerical_one(case):
    algorithm = changed(with_kl(case), mix=Mix(log_ratio_coef=0.3))
    _, given = example(rows=6)

    def loss(log_prob, mean):
        return compute(algorithm)(replace(given, log_prob=log_prob, mean=mean), algorithm).loss

    assert torch.autograd.gradcheck(loss, tuple(t.detach().requires_grad_() for t in (given.log_prob, given.mean)))


@pytest.mark.parametrize("case", CASES)
def test_everything_but_log_prob_and_mean_is_data(case):
    _, given = example(weight=torch.ones(24, dtype=torch.float64))
    leaves = {name: value.requires_grad_() for name, value in tensors(given).items()}
    compute(CASES[case])(replace(given, **leaves), with_kl(case)).loss.sum().backward()
    reached = {name for name, leaf in leaves.items() if leaf.grad is not None and leaf.grad.any()}
    assert reached == ({"log_prob", "mean"} if case in WITH_KL else {"log_prob"})


@pytest.mark.parametrize("case", CASES)
def test_float32_agrees_with_float64_in_value_and_gradient_and_metrics_are_detached_rows_of_that_dtype(case):
    algorithm = with_kl(case)
    _, given = example()
    results = []
    for dtype in (torch.float64, torch.float32):
        rows = tensors(given, dtype)
        leaves = rows["log_prob"].requires_grad_(), rows["mean"].requires_grad_()
        out = compute(algorithm)(replace(given, **rows), algorithm)
        assert (out.loss.shape, out.loss.dtype, out.loss.requires_grad) == ((24,), dtype, True)
        assert {"ratio_deviation", "approx_kl", "kl_ref"} <= out.metrics.keys()
        assert all((m.shape, m.dtype, m.requires_grad) == ((24,), dtype, False) for m in out.metrics.values())
        results.append((out.loss, *torch.autograd.grad(out.loss.sum(), leaves, materialize_grads=True)))
    for exact, single in zip(*results, strict=True):
        close(single.double(), exact, 1e-5)


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"grpo_guard/batch"}))
def test_a_sample_does_not_depend_on_its_batch(case):
    algorithm = with_kl(case)
    _, given = example()
    rows = tensors(given, torch.float32)
    whole = compute(algorithm)(replace(given, **rows), algorithm)
    for start in range(0, 24, 2):
        own = slice(start, start + 2)
        alone = compute(algorithm)(replace(given, **{name: value[own] for name, value in rows.items()}), algorithm)
        assert torch.equal(whole.loss[own], alone.loss)
        for name, value in alone.metrics.items():
            assert torch.equal(whole.metrics[name][own], value)


@pytest.mark.parametrize("case", CASES)
def test_a_weight_per_sample_multiplies_its_loss_and_gradient(case):
    weight = torch.linspace(0, 2, 12, dtype=torch.float64).repeat_interleave(2)
    steps, _ = example()
    loss, gradient = loss_and_gradient(steps, CASES[case])
    weighted, weighted_gradient = loss_and_gradient(steps, CASES[case], weight=weight)
    close(weighted, weight * loss.detach())
    close(weighted_gradient, weight[:, None, None] * gradient)


@pytest.mark.parametrize("case", WITH_KL)
def test_the_kl_is_added_unweighted(case):
    algorithm = changed(CASES[case], kl_coef=0.7)
    _, given = example(weight=torch.zeros(24, dtype=torch.float64))
    out = compute(algorithm)(given, algorithm)
    close(out.loss, 0.7 * out.metrics["kl_ref"])
    with pytest.raises(ValueError, match=r"kl_coef is 0\.7 but there is no ref_mean"):
        compute(algorithm)(example(ref_mean=None)[1], algorithm)
    assert "kl_ref" not in compute(algorithm)(example(ref_mean=None)[1], CASES[case]).metrics


@pytest.mark.parametrize("case", CASES)
@over(factor=st.floats(1e-3, 1e3))
@settings(max_examples=15, deadline=None)
def test_where_the_catalogue_says_homogeneous_loss_and_gradient_scale_with_the_advantage(case, factor):
    algorithm = CASES[case]
    assert find_objective(algorithm.name).homogeneous(algorithm)
    steps, _ = example()
    loss, gradient = loss_and_gradient(steps, algorithm)
    scaled, scaled_gradient = loss_and_gradient(steps, algorithm, advantage=factor * steps.advantage)
    torch.testing.assert_close(scaled, factor * loss, atol=0, rtol=1e-12)
    torch.testing.assert_close(scaled_gradient, factor * gradient, atol=1e-14 * factor, rtol=1e-12)


@pytest.mark.parametrize(
    ("case", "changes"),
    [*((case, {"kl_coef": 0.1}) for case in WITH_KL), ("mix_grpo", {"mix": Mix(log_ratio_coef=0.1)})],
)
def test_terms_that_do_not_scale_with_the_advantage_are_known_to_the_catalogue(case, changes):
    algorithm = changed(CASES[case], **changes)
    assert not find_objective(algorithm.name).homogeneous(algorithm)
    steps, _ = example()
    plain, doubled = (loss_and_gradient(steps, algorithm, advantage=k * steps.advantage)[0] for k in (1, 2))
    assert (doubled - 2 * plain).abs().max() > 1e-5


def model_gradient(model, batch, advantages, algorithm):
    """Returns the gradient of the summed loss of a linear velocity model on samples of two steps; batch tensors are
    (samples, 2, ...)."""
    x, x_next, old_log_prob, old_mean, sigma, sigma_next = (tensor.flatten(0, 1) for tensor in batch)
    model.zero_grad()
    rest = torch.full_like(sigma, 0.9), torch.full_like(sigma, 0.7)
    step = transition("flow", x, model(x), sigma, sigma_next, *rest)
    given = TransitionInputs(
        log_prob=log_prob("flow", x_next, step.mean, step.scale),
        old_log_prob=old_log_prob,
        advantage=advantages.repeat_interleave(2),
        mean=step.mean,
        old_mean=old_mean,
        std=step.std,
        scale=step.scale,
        nats_per_log_prob=torch.full_like(step.scale, 12),
        ref_mean=None,
        num_elements=12,
        kind="flow",
        steps_per_sample=2,
    )
    compute(algorithm)(given, algorithm).loss.sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ddof", [0, 1])
def test_streamed_gradients_scaled_at_the_end_are_the_full_batch_gradient(case, ddof):
    """Gives every group the same two steps, so the mean step scale of grpo_guard is the same in a group as in the
    batch."""
    torch.manual_seed(0)
    samples, groups = 12, torch.arange(3).repeat_interleave(4)
    rewards = torch.rand(samples, dtype=torch.float64)
    model = torch.nn.Linear(4, 4, dtype=torch.float64)
    x, noise = torch.randn(2, samples, 2, 3, 4, dtype=torch.float64)
    sigma, sigma_next = (
        torch.tensor(pair, dtype=torch.float64).expand(samples, 2) for pair in ((0.7, 0.6), (0.6, 0.5))
    )
    with torch.no_grad():
        rows = (tensor.flatten(0, 1) for tensor in (x, model(x), sigma, sigma_next))
        rest = (torch.full((2 * samples,), number, dtype=torch.float64) for number in (0.9, 0.7))
        taken = take_step("flow", *rows, *rest, noise.flatten(0, 1))
        x_next, old_log_prob, old_mean = (tensor.unflatten(0, (samples, 2)) for tensor in taken)
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    batch = (x, x_next, old_log_prob, old_mean, sigma, sigma_next)

    advantages = unclipped_advantages(rewards, groups, Advantage(ddof=ddof))
    full = model_gradient(model, batch, advantages, CASES[case])
    streamed = torch.zeros_like(full)
    for group in (2, 0, 1):
        own = groups == group
        streamed += model_gradient(model, tuple(tensor[own] for tensor in batch), centred(rewards[own]), CASES[case])
    streamed *= global_scale(rewards, Advantage(ddof=ddof))
    assert full.abs().max() > 1e-3
    torch.testing.assert_close(streamed, full, atol=1e-12, rtol=1e-12)
