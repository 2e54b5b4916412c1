import math
from dataclasses import replace

import pytest
import torch
from forward_rows import TOLERANCES, make_rows, mean_of_squares, numbers, per_row_gradient

from omni_async.algorithms.objectives.diffusion_dpo import diffusion_dpo
from omni_async.config.algorithm import Algorithm, Dpo

LOSSES = ("sigmoid", "hinge", "ipo")


def make_pairs(**changes):
    """Makes three pairs with common noise and sigma; the margin is positive in some of them and negative in others."""
    rows = make_rows(6, seed=2, **changes)
    return replace(rows, noise=rows.noise[::2].repeat_interleave(2, dim=0), sigma=rows.sigma[::2].repeat_interleave(2))


def make_settings(**changes):
    return Algorithm(dpo=Dpo(**changes))


def naive_pairs(rows):
    """Returns (d, winner error, loser error) of every pair, in Python floats."""
    v, v_ref, x0, noise = (numbers(tensor) for tensor in (rows.velocity, rows.ref_velocity, rows.final, rows.noise))
    aims = [[eps - clean for eps, clean in zip(*row, strict=True)] for row in zip(noise, x0, strict=True)]
    errors, gains = [], []
    for mine, reference, aim in zip(v, v_ref, aims, strict=True):
        errors.append(mean_of_squares(mine, aim))
        gains.append(errors[-1] - mean_of_squares(reference, aim))
    return [(gains[row] - gains[row + 1], errors[row], errors[row + 1]) for row in range(0, len(v), 2)]


def naive_loss(difference, dpo):
    strength = dpo.beta / 2 if dpo.halved else dpo.beta
    z = -difference
    return {
        "sigmoid": math.log1p(math.exp(-strength * z)),
        "hinge": max(1 - strength * z, 0.0),
        "ipo": (z - 1 / (2 * strength)) ** 2,
    }[dpo.loss]


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("halved", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_loss_is_the_formula_pair_by_pair(loss, halved, dtype, tolerance):
    algorithm = make_settings(loss=loss, halved=halved, beta=0.7)
    rows = make_pairs(dtype=dtype)
    out = diffusion_dpo(rows, algorithm)
    assert out.loss.dtype == dtype
    expected = torch.tensor(
        [naive_loss(d, algorithm.dpo) for d, _, _ in naive_pairs(rows) for _ in range(2)], dtype=dtype
    )
    torch.testing.assert_close(out.loss, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_is_that_of_the_loss(loss):
    rows = make_pairs()
    algorithm = make_settings(loss=loss, beta=0.7)
    assert torch.autograd.gradcheck(
        lambda velocity: diffusion_dpo(replace(rows, velocity=velocity), algorithm).loss, (rows.velocity,)
    )


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize(("halved", "strength"), [(True, 1000.0), (False, 2000.0)])
def test_at_the_reference_the_loss_is_log_two_and_winner_and_loser_are_moved_alike(halved, strength, dtype, tolerance):
    rows = make_pairs(dtype=dtype)
    rows = replace(rows, ref_velocity=rows.velocity.detach())
    out = diffusion_dpo(rows, make_settings(halved=halved))
    torch.testing.assert_close(out.loss, torch.full((6,), math.log(2), dtype=dtype), atol=tolerance, rtol=0)
    deviation = (rows.velocity - (rows.noise - rows.final)).detach()
    sign = torch.tensor([1.0, -1.0], dtype=dtype).repeat(3)[:, None, None]
    # both rows carry the loss, so the sum counts it twice: 2 * strength * sigmoid(0) * 2 deviation / D
    expected = sign * (2 * strength * 0.5 * 2 / 6) * deviation
    torch.testing.assert_close(per_row_gradient(out, rows), expected, atol=tolerance, rtol=tolerance)
    assert out.metrics["margin"].abs().max() == 0
    assert out.metrics["accuracy"].max() == 0


def test_saturated_pairs_stay_finite():
    rows = make_pairs(dtype=torch.float32)
    out = diffusion_dpo(rows, make_settings(beta=1e6))
    assert out.loss.isfinite().all()
    assert per_row_gradient(out, rows).isfinite().all()
    wrong = torch.tensor([d > 0 for d, _, _ in naive_pairs(rows) for _ in range(2)])
    assert 0 < wrong.sum() < 6
    assert (out.loss[~wrong] == 0).all()
    torch.testing.assert_close(out.loss[wrong], -out.metrics["margin"][wrong])


def test_metrics_by_hand_and_detached():
    rows = make_pairs()
    metrics = diffusion_dpo(rows, make_settings(beta=3.0)).metrics
    pairs = [pair for pair in naive_pairs(rows) for _ in range(2)]
    expected = {
        "margin": [-1.5 * d for d, _, _ in pairs],
        "accuracy": [float(d < 0) for d, _, _ in pairs],
        "winner_error": [winner for _, winner, _ in pairs],
        "loser_error": [loser for _, _, loser in pairs],
    }
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(metrics[name], torch.tensor(value, dtype=torch.float64), atol=1e-12, rtol=1e-12)
        assert not metrics[name].requires_grad
    assert 0 < metrics["accuracy"].sum() < 6


def test_the_reference_gets_no_gradient():
    reference = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
    diffusion_dpo(make_pairs(ref_velocity=reference), make_settings()).loss.sum().backward()
    assert reference.grad is None


def test_rows_that_are_no_pairs_are_refused():
    rows = make_pairs()
    noise, sigma = rows.noise.clone(), rows.sigma.clone()
    noise[3, 1, 2] += 1e-9
    sigma[5] = 0.123
    for broken, message in (
        (replace(rows, noise=noise), r"noise .* differs in pair 1 \(rows 2, 3\)"),
        (replace(rows, sigma=sigma), r"sigma .* pair 2"),
    ):
        with pytest.raises(ValueError, match=message):
            diffusion_dpo(broken, make_settings())
    with pytest.raises(ValueError, match="odd number of rows, 3"):
        diffusion_dpo(make_rows(3), make_settings())
    with pytest.raises(ValueError, match="diffusion_dpo needs ref_velocity"):
        diffusion_dpo(replace(rows, ref_velocity=None), make_settings())
