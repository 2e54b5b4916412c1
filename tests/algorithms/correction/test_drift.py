import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_async.algorithms.correction.drift import Drift, effective_sample_size


def matrix(*rows):
    return torch.tensor(rows, dtype=torch.float64)


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_the_effective_sample_size_is_its_formula(log_weights):
    weights = [math.exp(value) for value in log_weights]
    expected = (sum(weights) / len(weights)) ** 2 / (sum(w * w for w in weights) / len(weights))
    got = effective_sample_size(matrix(*log_weights)).item()
    assert got == pytest.approx(expected, rel=1e-12)
    assert 0 < got <= 1


def test_the_effective_sample_size_of_weights_beyond_floating_point():
    assert effective_sample_size(matrix(5000.0, 5000.0, -5000.0, -5000.0)).item() == 0.5
    assert effective_sample_size(matrix(-1e6, -1e6 + math.log(3.0))).item() == pytest.approx(16 / 20, rel=1e-9)


def test_minus_infinity_is_a_weight_of_zero():
    assert effective_sample_size(matrix(0.0, -math.inf)).item() == 0.5
    assert effective_sample_size(matrix(-math.inf, -math.inf)).item() == 0.0


def test_the_effective_sample_size_reduces_the_first_dimension_alone():
    values = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = effective_sample_size(values)
    assert got.shape == (3,)
    for step in range(3):
        assert got[step].item() == pytest.approx(effective_sample_size(values[:, step]).item(), rel=1e-14)


@pytest.mark.parametrize(
    ("log_ratio", "kappa", "message"),
    [
        (torch.zeros(3, dtype=torch.float64), None, r"shape \(N, W\) with N, W >= 1, got \(3,\)"),
        (torch.zeros(0, 2, dtype=torch.float64), None, r"shape \(N, W\) with N, W >= 1, got \(0, 2\)"),
        (torch.zeros(1, 2), None, r"log_ratio must be float64 of shape \(1, 2\), got torch.float32"),
        (matrix([0.0, math.nan]), None, "log_ratio must be finite, got nan in sample 0, step 1"),
        (matrix([0.0], [-math.inf]), None, "log_ratio must be finite, got -inf in sample 1, step 0"),
        (
            matrix([0.0, 0.0]),
            matrix([0.0]),
            r"kappa must be float64 of shape \(1, 2\), got torch.float64 of shape \(1, 1\)",
        ),
        (matrix([0.0]), matrix([-0.5]), "kappa must be finite and >= 0, got -0.5 in sample 0, step 0"),
        (matrix([0.0]), matrix([math.inf]), "kappa must be finite and >= 0, got inf"),
        (matrix([0.0]).requires_grad_(), None, "log_ratio requires a gradient.*detach"),
    ],
)
def test_drift_that_cannot_be_is_refused(log_ratio, kappa, message):
    with pytest.raises(ValueError, match=message):
        Drift(log_ratio, kappa)
