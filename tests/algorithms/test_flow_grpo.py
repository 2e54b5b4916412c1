import math
from dataclasses import replace

import pytest
import torch

from omni_async.algorithms.advantages import centred, global_scale, group_advantages
from omni_async.algorithms.objectives.flow_grpo import ObjectiveSettings, StepInputs, flow_grpo, resolve_clip_range
from omni_async.sde.transitions import log_prob, nats_per_log_prob, take_step, transition

torch.set_num_threads(1)

SETTINGS = ObjectiveSettings(clip_range=0.1)


def inputs(ratios, advantages, dtype=torch.float64, **changes):
    count = len(ratios)
    given = StepInputs(
        log_prob=torch.tensor(ratios, dtype=dtype).log().requires_grad_(),
        old_log_prob=torch.zeros(count, dtype=dtype),
        advantage=torch.tensor(advantages, dtype=dtype),
        mean=torch.zeros(count, 2, 3, dtype=dtype),
        old_mean=None,
        std=torch.full((count,), 0.5, dtype=dtype),
        scale=torch.full((count,), 0.2, dtype=dtype),
        ref_mean=None,
        num_elements=6,
        kind="flow",
    )
    return replace(given, **changes)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_the_clipped_surrogate_and_its_gradient_by_hand(dtype, tolerance):
    given = inputs([1.05, 1.3, 0.7, 1.3, 0.7, 1.0], [2.0, 2.0, 2.0, -2.0, -2.0, 0.0], dtype)
    out = flow_grpo(given, SETTINGS)
    assert out.loss.dtype == dtype
    torch.testing.assert_close(out.loss, torch.tensor([-2.1, -2.2, -1.4, 2.6, 1.8, 0.0], dtype=dtype), atol=tolerance, rtol=tolerance)
    out.loss.sum().backward()
    expected = torch.tensor([-2.1, 0.0, -1.4, 2.6, 0.0, 0.0], dtype=dtype)  # -A r, and 0 where the clip holds
    torch.testing.assert_close(given.log_prob.grad, expected, atol=tolerance, rtol=tolerance)
    assert out.metrics["clipped_high"].tolist() == [0, 1, 0, 1, 0, 0]
    assert out.metrics["clipped_low"].tolist() == [0, 0, 1, 0, 1, 0]


def test_metrics_by_hand_and_detached():
    mean = torch.zeros(2, 2, 3, dtype=torch.float64, requires_grad=True)
    old_mean = torch.full((2, 2, 3), 0.1, dtype=torch.float64)
    out = flow_grpo(inputs([1.2, 0.9], [1.0, 1.0], mean=mean, old_mean=old_mean, ref_mean=old_mean), SETTINGS)
    logs = torch.tensor([math.log(1.2), math.log(0.9)], dtype=torch.float64)
    expected = {
        "ratio_deviation": [0.2, 0.1],
        "approx_kl": 0.5 * logs**2,
        "log_ratio_nats": 6 * logs,
        "kappa_nats": [6 * 0.01 / (2 * 0.04)] * 2,
        "kl_ref": [0.01 / (2 * 0.25)] * 2,
    }
    for name, value in expected.items():
        torch.testing.assert_close(out.metrics[name], torch.as_tensor(value, dtype=torch.float64))
    assert all(value.shape == (2,) and not value.requires_grad for value in out.metrics.values())


def test_optional_metrics_are_absent_without_their_means():
    assert not {"kappa_nats", "kl_ref"} & flow_grpo(inputs([1.0], [1.0]), SETTINGS).metrics.keys()


@pytest.mark.parametrize(("form", "width"), [("published", 0.5), ("exact", 0.2)])
def test_kl_divides_by_std_or_scale_and_pulls_the_mean_to_the_reference(form, width):
    mean = torch.full((1, 2, 3), 0.3, dtype=torch.float64, requires_grad=True)
    given = inputs([1.0], [0.0], mean=mean, ref_mean=torch.full((1, 2, 3), 0.1, dtype=torch.float64))
    out = flow_grpo(given, ObjectiveSettings(clip_range=0.1, kl_coef=0.5, kl_form=form))
    assert out.loss.item() == pytest.approx(0.5 * 0.04 / (2 * width**2))
    out.loss.sum().backward()
    torch.testing.assert_close(mean.grad, torch.full_like(mean, 0.5 * 0.2 / (width**2 * 6)))


def test_the_exact_kl_is_torchs_gaussian_divergence_per_element():
    mean, ref = torch.randn(2, 3, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out = flow_grpo(inputs([1.0] * 3, [0.0] * 3, mean=mean, ref_mean=ref), ObjectiveSettings(clip_range=0.1, kl_form="exact"))
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(normal(mean, 0.2), normal(ref, 0.2)).mean(dim=(1, 2))
    torch.testing.assert_close(out.metrics["kl_ref"], expected)


@pytest.mark.parametrize("kind", ["flow", "cps", "dance"])
def test_nats_agree_with_the_transition_module(kind):
    given = inputs([1.001, 0.998], [1.0, 1.0], kind=kind)
    nats = flow_grpo(given, SETTINGS).metrics["log_ratio_nats"]
    torch.testing.assert_close(nats, nats_per_log_prob(kind, given.scale, 6) * given.log_prob.detach())


def test_tiny_clip_ranges_work_in_float32():
    given = inputs([1.0, 1.0], [1.0, 1.0], torch.float32, log_prob=torch.tensor([0.9e-6, 1.1e-6]))
    out = flow_grpo(given, ObjectiveSettings(clip_range=1e-6))
    assert out.metrics["clipped_high"].tolist() == [0, 1]


def test_a_row_does_not_depend_on_its_batch():
    generator = torch.Generator().manual_seed(3)
    mean, old, ref = torch.randn(3, 9, 2, 3, generator=generator)
    ratios = (1 + 0.2 * torch.randn(9, generator=generator)).abs().tolist()
    advantages = torch.randn(9, generator=generator).tolist()
    settings = ObjectiveSettings(clip_range=0.1, kl_coef=0.1)
    whole = flow_grpo(inputs(ratios, advantages, torch.float32, mean=mean, old_mean=old, ref_mean=ref), settings)
    for row in range(9):
        own = slice(row, row + 1)
        alone = flow_grpo(
            inputs(ratios[own], advantages[own], torch.float32, mean=mean[own], old_mean=old[own], ref_mean=ref[own]), settings
        )
        assert torch.equal(whole.loss[own], alone.loss)
        for name, value in alone.metrics.items():
            assert torch.equal(whole.metrics[name][own], value)


def step_gradient(model, batch, advantages, settings):
    """Gradient of the summed loss of a tiny linear velocity model."""
    x, sigma, sigma_next, sigma_max, noise_level, x_next, old = batch
    model.zero_grad()
    step = transition("flow", x, model(x), sigma, sigma_next, sigma_max, noise_level)
    given = StepInputs(
        log_prob=log_prob("flow", x_next, step.mean, step.scale),
        old_log_prob=old,
        advantage=advantages,
        mean=step.mean,
        old_mean=None,
        std=step.std,
        scale=step.scale,
        ref_mean=None,
        num_elements=12,
        kind="flow",
    )
    flow_grpo(given, settings).loss.sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("ddof", [0, 1])
def test_streamed_gradients_scaled_at_the_end_are_the_full_batch_gradient(ddof):
    torch.manual_seed(0)
    count, groups = 12, torch.arange(3).repeat_interleave(4)
    rewards = torch.rand(count, dtype=torch.float64)
    model = torch.nn.Linear(4, 4, dtype=torch.float64)
    x, noise = torch.randn(2, count, 3, 4, dtype=torch.float64)
    sigma, sigma_next, sigma_max, noise_level = (torch.full((count,), n, dtype=torch.float64) for n in (0.7, 0.6, 0.9, 0.7))
    with torch.no_grad():
        x_next, old, _ = take_step("flow", x, model(x), sigma, sigma_next, sigma_max, noise_level, noise)
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    batch = (x, sigma, sigma_next, sigma_max, noise_level, x_next, old)
    settings = ObjectiveSettings(clip_range=0.02)

    advantages = group_advantages(rewards, groups, std="global", ddof=ddof, eps=1e-4, clip_max=5.0)
    full = step_gradient(model, batch, advantages, settings)
    streamed = torch.zeros_like(full)
    for group in (2, 0, 1):
        own = groups == group
        streamed += step_gradient(model, tuple(tensor[own] for tensor in batch), centred(rewards[own]), settings)
    streamed *= global_scale(rewards, ddof=ddof, eps=1e-4)
    assert full.abs().max() > 1e-3
    torch.testing.assert_close(streamed, full, atol=1e-12, rtol=1e-12)


def test_clip_range_from_nats_scales_with_resolution():
    assert resolve_clip_range(None, None, 65_536) == 1e-4
    assert resolve_clip_range(2e-5, None, 65_536) == 2e-5
    assert resolve_clip_range(None, 0.5, 65_536) == 0.5 / 65_536
    with pytest.raises(ValueError, match=r"not both \(got 0.0001 and 0.5\)"):
        resolve_clip_range(1e-4, 0.5, 65_536)
    with pytest.raises(ValueError, match="num_elements must be >= 1, got 0"):
        resolve_clip_range(None, 0.5, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"old_log_prob": torch.zeros(2)}, r"old_log_prob must have shape \(1,\).*got \(2,\)"),
        ({"num_elements": 5}, r"1 rows of 5 elements, got shape \(1, 2, 3\)"),
        ({"ref_mean": torch.zeros(1, 6)}, r"ref_mean must have shape \(1, 2, 3\).*got \(1, 6\)"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        inputs([1.0], [1.0], **change)


def test_a_kl_without_reference_is_refused():
    with pytest.raises(ValueError, match=r"kl_coef is 0.04 but there is no ref_mean"):
        flow_grpo(inputs([1.0], [1.0]), ObjectiveSettings(clip_range=0.1, kl_coef=0.04))
