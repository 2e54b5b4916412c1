import math

import pytest
import torch
from forward_rows import TOLERANCES, make_rows, mean_of_squares, numbers, per_row_gradient

from omni_async.algorithms.objectives.awm import awm, log_likelihood
from omni_async.algorithms.objectives.base import ForwardInputs
from omni_async.config.algorithm import Advantage, Algorithm, Awm

WEIGHTINGS = ("uniform", "sigma", "sigma_squared", "huber", "ghuber")


def make_settings(*, kl_coef=0.0, clip_max=5.0, **changes):
    return Algorithm(kl_coef=kl_coef, advantage=Advantage(clip_max=clip_max), awm=Awm(**changes))


def naive_likelihood(error, sigma, settings):
    power, shifted = settings.power, error + 1e-10
    return {
        "uniform": -error,
        "sigma": -error * sigma,
        "sigma_squared": -error * sigma * sigma,
        "huber": -(math.sqrt(shifted) - 1e-5) * sigma,
        "ghuber": -(shifted**power - 1e-10**power) * sigma / power,
    }[settings.weighting]


def naive_losses(rows, algorithm):
    """Computes losses sample by sample, draw by draw, in Python floats."""
    settings, a, losses = algorithm.awm, algorithm.advantage.clip_max, []
    names = ("velocity", "old_velocity", "ref_velocity", "ema_velocity", "final", "noise")
    columns = zip(*(numbers(getattr(rows, name)) for name in names), strict=True)
    current, old, pulls = [], [], []
    end = settings.ema_coef if settings.ema_coef_end is None else settings.ema_coef_end
    ema_coef = settings.ema_coef + (end - settings.ema_coef) * rows.progress
    for (v, v_old, v_ref, v_ema, x0, noise), sigma in zip(columns, rows.sigma.tolist(), strict=True):
        aim = [eps - clean for eps, clean in zip(noise, x0, strict=True)]
        current.append(naive_likelihood(mean_of_squares(v, aim), sigma, settings))
        old.append(naive_likelihood(mean_of_squares(v_old, aim), sigma, settings))
        std = 0.7 * math.sqrt(sigma / (1 - min(sigma, 0.99)))
        divisor = 1.0 if settings.kl_form == "velocity" else 2 * std**2
        pulls.append((algorithm.kl_coef * mean_of_squares(v, v_ref) + ema_coef * mean_of_squares(v, v_ema)) / divisor)
    for start in range(0, len(pulls), rows.draws):
        sample = range(start, start + rows.draws)
        advantage = min(max(rows.advantage[start].item(), -a), a)
        if settings.advantage_max is not None:
            advantage *= settings.advantage_max / a
        together = math.exp(sum(current[row] - old[row] for row in sample) / rows.draws)
        for row in sample:
            ratio = together if settings.ratio == "sum_first" else math.exp(current[row] - old[row])
            clipped = min(max(ratio, 1 - settings.clip_range), 1 + settings.clip_range)
            losses.append(max(-advantage * ratio, -advantage * clipped) + pulls[row])
    return torch.tensor(losses, dtype=torch.float64)


def sample_rows(**changes):
    """Makes two samples of three draws, each with one advantage."""
    changes.setdefault("advantage", torch.tensor([3.0] * 3 + [-7.0] * 3, dtype=changes.get("dtype", torch.float64)))
    return make_rows(draws=3, **changes)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("ratio", ["exp_first", "sum_first"])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_the_loss_is_the_formula_row_by_row(weighting, ratio, dtype, tolerance):
    algorithm = make_settings(
        kl_coef=0.2,
        weighting=weighting,
        power=0.3,
        ratio=ratio,
        clip_range=0.4,
        ema_coef=1.0,
        ema_coef_end=0.3,
        kl_form="elbo",
    )
    rows = sample_rows(dtype=dtype, progress=0.25)
    out = awm(rows, algorithm)
    assert out.loss.dtype == dtype
    torch.testing.assert_close(out.loss, naive_losses(rows, algorithm).to(dtype), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("advantage_max", [None, 1.0, 0.5])
def test_advantages_are_clamped_and_rescaled(advantage_max):
    algorithm = make_settings(clip_max=2.0, advantage_max=advantage_max)
    rows = sample_rows()
    torch.testing.assert_close(awm(rows, algorithm).loss, naive_losses(rows, algorithm), atol=1e-12, rtol=1e-12)
    on_policy = awm(sample_rows(without=["old_velocity"]), algorithm).loss  # -A alone
    expected = torch.tensor([-2.0] * 3 + [2.0] * 3, dtype=torch.float64) * (
        1 if advantage_max is None else advantage_max / 2
    )
    torch.testing.assert_close(on_policy, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("ratio", ["exp_first", "sum_first"])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("kl_form", ["velocity", "elbo"])
def test_the_gradient_is_that_of_the_loss(kl_form, weighting, ratio):
    algorithm = make_settings(
        kl_coef=0.2, weighting=weighting, ratio=ratio, clip_range=0.9, ema_coef=0.5, kl_form=kl_form
    )
    rows = sample_rows()

    def losses(velocity):
        return awm(sample_rows_with(rows, velocity), algorithm).loss

    assert torch.autograd.gradcheck(losses, (rows.velocity,), atol=1e-7)


def sample_rows_with(rows, velocity):
    return ForwardInputs(
        velocity,
        rows.final,
        rows.noise,
        rows.sigma,
        rows.advantage,
        rows.old_velocity,
        rows.ref_velocity,
        rows.ema_velocity,
        rows.draws,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("ratio", ["exp_first", "sum_first"])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_on_policy_the_gradient_is_that_of_the_weighted_error(weighting, ratio, dtype, tolerance):
    """Checks that the gradient of -A p(m) is -A p'(m) 2 (v - target) / D, whichever ratio is taken."""
    algorithm = make_settings(weighting=weighting, power=0.3, ratio=ratio)
    rows = sample_rows(dtype=dtype, without=["old_velocity"])
    out = awm(rows, algorithm)
    torch.testing.assert_close(out.loss, -rows.advantage.clamp(-5, 5) / 5, atol=tolerance, rtol=0)
    deviation = (rows.velocity - (rows.noise - rows.final)).detach()
    error, sigma = deviation.square().mean(dim=(1, 2)), rows.sigma
    slope = {
        "uniform": torch.ones_like(sigma),
        "sigma": sigma,
        "sigma_squared": sigma**2,
        "huber": 0.5 * sigma / (error + 1e-10).sqrt(),
        "ghuber": sigma * (error + 1e-10) ** (0.3 - 1),
    }[weighting]
    expected = (rows.advantage.clamp(-5, 5) / 5 * slope * 2 / 6)[:, None, None] * deviation
    torch.testing.assert_close(per_row_gradient(out, rows), expected, atol=tolerance, rtol=tolerance)
    explicit = awm(sample_rows(dtype=dtype, old_velocity=rows.velocity.detach()), algorithm)
    assert torch.equal(out.loss, explicit.loss)


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "clipped"),
    [(5.0, 0.3, True), (5.0, -0.3, False), (-5.0, 0.3, False), (-5.0, -0.3, True), (5.0, 0.1, False)],
)
def test_the_clip_stops_the_gradient_only_where_the_surrogate_would_improve(advantage, log_ratio, clipped):
    """Sets target 0, velocity 1 everywhere: p = -1 under `uniform`, and old_velocity sqrt(1 + l) has p - p_old = l."""
    zeros = torch.zeros(1, 2, 3, dtype=torch.float64)
    velocity = torch.ones_like(zeros).requires_grad_()
    old = torch.full_like(zeros, math.sqrt(1 + log_ratio))
    one = torch.ones(1, dtype=torch.float64)
    rows = ForwardInputs(velocity, zeros, zeros, 0.5 * one, advantage * one, old)
    out = awm(rows, make_settings(weighting="uniform", clip_range=0.2))
    gradient = per_row_gradient(out, rows)
    ratio = math.exp(log_ratio)
    assert out.loss.item() == pytest.approx(-advantage / 5 * (min(max(ratio, 0.8), 1.2) if clipped else ratio))
    expected = 0.0 if clipped else advantage / 5 * ratio * 2 / 6
    torch.testing.assert_close(gradient, torch.full_like(zeros, expected))
    assert out.metrics["ratio_deviation"].item() == pytest.approx(abs(ratio - 1))
    assert out.metrics["approx_kl"].item() == pytest.approx(log_ratio**2 / 2)
    assert out.metrics["clipped_high"].item() == (ratio > 1.2)
    assert out.metrics["clipped_low"].item() == (ratio < 0.8)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_the_likelihood_is_greatest_and_finite_where_there_is_no_error(weighting):
    error = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    value = log_likelihood(error, torch.full((1,), 0.5, dtype=torch.float64), Awm(weighting=weighting))
    assert value.item() == pytest.approx(0.0, abs=1e-18)
    value.backward()
    assert error.grad.isfinite().all()
    assert error.grad < 0


def test_the_elbo_form_weights_by_the_reference_variance():
    """Expects std^2 = .49 sigma / (1 - sigma), where 1 - sigma is at least .01."""
    sigma = torch.tensor([0.5, 0.99, 1.0], dtype=torch.float64)
    rows = make_rows(3, sigma=sigma)
    plain = awm(rows, make_settings()).metrics
    elbo = awm(rows, make_settings(kl_form="elbo")).metrics
    factor = torch.tensor([1 / 0.98, 0.01 / (0.98 * 0.99), 0.01 / 0.98], dtype=torch.float64)
    for name in ("kl_ref", "kl_ema"):
        torch.testing.assert_close(elbo[name], factor * plain[name], atol=1e-12, rtol=1e-12)


def test_metrics_are_detached_and_absent_without_their_velocities():
    metrics = awm(sample_rows(), make_settings(kl_coef=0.1, ema_coef=0.1)).metrics
    assert all(value.shape == (6,) and not value.requires_grad for value in metrics.values())
    rows = sample_rows(without=["ref_velocity", "ema_velocity"])
    fewer = awm(rows, make_settings()).metrics
    assert metrics.keys() - fewer.keys() == {"kl_ref", "kl_ema"}
    aims = numbers(rows.noise - rows.final)
    expected = [mean_of_squares(a, b) for a, b in zip(numbers(rows.velocity), aims, strict=True)]
    torch.testing.assert_close(fewer["flow_error"], torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("missing", "changes", "message"),
    [
        ("ref_velocity", {"kl_coef": 0.1}, "kl_coef is 0.1 but there is no ref_velocity"),
        ("ema_velocity", {"ema_coef": 0.1}, "awm.ema_coef is 0.1 and ema_coef_end None, but there is no ema_velocity"),
        (
            "ema_velocity",
            {"ema_coef_end": 0.3},
            "awm.ema_coef is 0.0 and ema_coef_end 0.3, but there is no ema_velocity",
        ),
        ("old_velocity", {"off_policy": True}, "awm.off_policy is set but there is no old_velocity"),
    ],
)
def test_missing_velocities_are_named(missing, changes, message):
    with pytest.raises(ValueError, match=message):
        awm(make_rows(without=[missing]), make_settings(**changes))
