import pytest
import torch
from forward_rows import TOLERANCES, make_rows, mean_of_squares, numbers, per_row_gradient
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_async.algorithms.objectives.base import ForwardInputs
from omni_async.algorithms.objectives.diffusion_nft import diffusion_nft, preference
from omni_async.config.algorithm import Advantage, Algorithm, Nft

MODES = ("all", "positive_only", "negative_only", "one_only", "binary")


def make_settings(*, beta=1.0, mode="all", clip_max=5.0, kl_coef=0.0):
    return Algorithm(kl_coef=kl_coef, advantage=Advantage(clip_max=clip_max), nft=Nft(beta=beta, adv_mode=mode))


def naive_row(row, rows, algorithm, weights=None):
    """Computes the loss of one row, element by element through x_sigma; `weights` replaces (w+, w-). Also returns the
    weights."""
    sigma, a, beta = rows.sigma[row].item(), algorithm.advantage.clip_max, algorithm.nft.beta
    v, v_old, v_ref, x0, noise = (
        numbers(tensor)[row] for tensor in (rows.velocity, rows.old_velocity, rows.ref_velocity, rows.final, rows.noise)
    )
    x = [(1 - sigma) * clean + sigma * eps for clean, eps in zip(x0, noise, strict=True)]
    positive = [beta * new + (1 - beta) * old for new, old in zip(v, v_old, strict=True)]
    negative = [(1 + beta) * old - beta * new for new, old in zip(v, v_old, strict=True)]
    predictions = [
        [noisy - sigma * u for noisy, u in zip(x, velocity, strict=True)] for velocity in (positive, negative)
    ]
    if weights is None:
        distances = [
            sum(abs(p - q) for p, q in zip(prediction, x0, strict=True)) / len(x0) for prediction in predictions
        ]
        weights = [max(distance, 1e-5) for distance in distances]
    r = min(max(min(max(rows.advantage[row].item(), -a), a) / (2 * a) + 0.5, 0), 1)
    parts = [mean_of_squares(prediction, x0) / weight for prediction, weight in zip(predictions, weights, strict=True)]
    return a * (r * parts[0] + (1 - r) * parts[1]) / beta + algorithm.kl_coef * mean_of_squares(v, v_ref), weights


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0, 2.0])
def test_the_loss_is_the_formula_row_by_row(beta, dtype, tolerance):
    algorithm = make_settings(beta=beta, kl_coef=0.3)
    rows = make_rows(dtype=dtype)
    out = diffusion_nft(rows, algorithm)
    assert out.loss.dtype == dtype
    expected = torch.tensor([naive_row(row, rows, algorithm)[0] for row in range(6)], dtype=dtype)
    torch.testing.assert_close(out.loss, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-7), (torch.float32, 1e-5)])
def test_the_gradient_is_that_of_the_formula_with_the_weights_held(dtype, tolerance):
    algorithm = make_settings(beta=0.5, kl_coef=0.3)
    rows = make_rows(dtype=dtype)
    gradient = per_row_gradient(diffusion_nft(rows, algorithm), rows)
    precise = make_rows()
    step, flat = 1e-6, precise.velocity.detach().reshape(6, -1)
    for row in range(6):
        weights = naive_row(row, precise, algorithm)[1]
        for element in range(flat.shape[1]):
            sides = []
            for sign in (1, -1):
                moved = flat.clone()
                moved[row, element] += sign * step
                sides.append(naive_row(row, make_rows(velocity=moved.reshape(6, 2, 3)), algorithm, weights)[0])
            slope = (sides[0] - sides[1]) / (2 * step)
            assert gradient.reshape(6, -1)[row, element].item() == pytest.approx(slope, abs=tolerance, rel=tolerance)


def test_a_perfect_prediction_is_divided_by_the_floor():
    """Expects (1e-6)^2 / 1e-5 for the error 1e-6, since <|x - x0|> is below 1e-5."""
    zeros = torch.zeros(1, 2, 3, dtype=torch.float64)
    velocity = torch.full_like(zeros, 2e-6)
    sigma, advantage = torch.tensor([0.5], dtype=torch.float64), torch.tensor([5.0], dtype=torch.float64)
    rows = ForwardInputs(velocity, zeros, zeros, sigma, advantage, old_velocity=velocity)
    assert diffusion_nft(rows, make_settings()).loss.item() == pytest.approx(5 * 1e-12 / 1e-5)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("all", [0.0, 0.25, 0.5, 0.75, 1.0]),
        ("positive_only", [0.5, 0.5, 0.5, 0.75, 1.0]),
        ("negative_only", [0.0, 0.25, 0.5, 0.5, 0.5]),
        ("one_only", [0.5, 0.5, 0.5, 0.75, 0.75]),
        ("binary", [0.25, 0.25, 0.5, 0.75, 0.75]),
    ],
)
def test_preferences_by_hand(mode, expected):
    advantage = torch.tensor([-9.0, -1.0, 0.0, 1.0, 9.0])
    assert preference(advantage, 2.0, mode).tolist() == expected
    rows = make_rows(5, dtype=torch.float32, advantage=advantage)
    assert diffusion_nft(rows, make_settings(mode=mode, clip_max=2.0)).metrics["preference"].tolist() == expected


@given(advantage=st.floats(-100, 100), clip_max=st.floats(0.01, 10), mode=st.sampled_from(MODES))
@settings(max_examples=100, deadline=None)
def test_a_preference_is_a_probability_on_the_side_of_the_advantage(advantage, clip_max, mode):
    r = preference(torch.tensor([advantage], dtype=torch.float64), clip_max, mode).item()
    assert 0 <= r <= 1
    assert (r - 0.5) * advantage >= 0


def test_metrics_by_hand_and_detached():
    rows = make_rows()
    out = diffusion_nft(rows, make_settings(beta=0.5))
    names = {"preference", "positive_loss", "negative_loss", "old_deviation", "kl_ref"}
    assert out.metrics.keys() == names
    assert all(value.shape == (6,) and not value.requires_grad for value in out.metrics.values())
    r, positive, negative = (out.metrics[name] for name in ("preference", "positive_loss", "negative_loss"))
    torch.testing.assert_close(out.loss.detach(), 5 * (r * positive + (1 - r) * negative) / 0.5)
    for name, other in (("old_deviation", rows.old_velocity), ("kl_ref", rows.ref_velocity)):
        expected = [mean_of_squares(a, b) for a, b in zip(numbers(rows.velocity), numbers(other), strict=True)]
        torch.testing.assert_close(
            out.metrics[name], torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=1e-12
        )


def test_only_the_current_velocity_gets_a_gradient():
    others = {
        name: torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True) for name in ("old_velocity", "ref_velocity")
    }
    advantage = torch.ones(6, dtype=torch.float64, requires_grad=True)
    rows = make_rows(advantage=advantage, **others)
    diffusion_nft(rows, make_settings(kl_coef=0.1)).loss.sum().backward()
    assert rows.velocity.grad.abs().min() > 0
    assert all(tensor.grad is None for tensor in (*others.values(), advantage))


def test_missing_velocities_are_named():
    with pytest.raises(ValueError, match="diffusion_nft needs old_velocity"):
        diffusion_nft(make_rows(without=["old_velocity"]), make_settings())
    with pytest.raises(ValueError, match=r"kl_coef is 0.1 but there is no ref_velocity"):
        diffusion_nft(make_rows(without=["ref_velocity"]), make_settings(kl_coef=0.1))
    assert "kl_ref" not in diffusion_nft(make_rows(without=["ref_velocity"]), make_settings()).metrics
