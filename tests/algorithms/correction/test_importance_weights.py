import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_async.algorithms.correction.drift import effective_sample_size
from omni_async.algorithms.correction.tempering import tempering_exponent
from omni_async.algorithms.correction.weights import importance_weights, per_element
from omni_async.config.algorithm import Correction


def asked(**changes):
    return Correction(**{"mode": "decoupled", "weights": "importance", "cap": None, **changes})


def matrix(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def naive(log_ratio, settings, num_elements):
    """Computes importance weights alone, row by row with Python numbers."""
    weights = []
    for row in log_ratio.tolist():
        if settings.log_ratio == "mean":
            row = [value / num_elements for value in row]
        if settings.level == "trajectory":
            whole = sum(row) / len(row) if settings.log_ratio == "mean" else sum(row)
            row = [whole] * len(row)
        if settings.level == "sequence":
            row = [sum(row)] * len(row)
        own = [math.exp(min(max(value, -20.0), 20.0)) for value in row]
        if settings.band is not None:
            own = [w if settings.band[0] <= w <= settings.band[1] else 0.0 for w in own]
        if settings.cap is not None:
            own = [min(w, settings.cap) for w in own]
        weights.append(own)
    return matrix(*weights)


@given(
    st.sampled_from(["step", "trajectory", "sequence"]),
    st.sampled_from(["sum", "mean"]),
    st.sampled_from([None, 0.8, 2.0]),
    st.sampled_from([None, (0.5, 3.0)]),
    st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_importance_weights_are_their_formula(level, form, cap, band, seed):
    log_ratio = 15 * torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) ** 3
    chosen = asked(level=level, log_ratio=form, cap=cap, band=band)
    weight, gamma = importance_weights(log_ratio, chosen, 6)
    assert gamma == 1.0
    torch.testing.assert_close(weight, naive(log_ratio, chosen, 6), atol=1e-12, rtol=1e-12)


def test_the_band_judges_weights_before_the_cap_truncates_them():
    weight, _ = importance_weights(matrix([0.4, 0.9, 2.5, 3.5]).log(), asked(cap=2.0, band=(0.5, 3.0)), 1)
    assert weight.tolist()[0] == pytest.approx([0.0, 0.9, 2.0, 0.0])


@pytest.mark.parametrize("level", ["step", "trajectory"])
def test_tempered_weights_reach_the_target(level):
    log_ratio = -2 + 2 * torch.randn(5000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight, gamma = importance_weights(log_ratio, asked(weights="tempered", level=level, ess_target=0.6), 50)
    assert 0 < gamma < 1
    assert effective_sample_size(weight.log().flatten()).item() == pytest.approx(0.6, rel=1e-6)
    exponent = log_ratio if level == "step" else log_ratio.sum(dim=1)
    assert gamma == pytest.approx(tempering_exponent(exponent, 0.6), rel=1e-8)
    torch.testing.assert_close(weight[:, 1], (gamma * (exponent[:, 1] if level == "step" else exponent)).exp())


@given(st.integers(0, 1000), st.floats(0.1, 30.0), st.floats(0.1, 3.0))
@settings(max_examples=60, deadline=None)
def test_clamp_and_cap_never_lower_the_effective_sample_size(seed, spread, cap):
    log_ratio = spread * torch.randn(40, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    exact = effective_sample_size(log_ratio).item()
    capped, _ = importance_weights(log_ratio, asked(cap=cap), 1)
    assert effective_sample_size(capped.log()).item() >= exact * (1 - 1e-12)
    tempered, _ = importance_weights(log_ratio, asked(weights="tempered", ess_target=0.7, cap=cap), 1)
    assert effective_sample_size(tempered.log()).item() >= 0.7 * (1 - 1e-12)


def test_log_ratios_per_latent_element():
    assert per_element(matrix([6.0]), asked(log_ratio="mean"), 3).item() == 2.0
    assert per_element(matrix([6.0]), asked(), 3).item() == 6.0
    with pytest.raises(ValueError, match="num_elements must be >= 1, got 0"):
        per_element(matrix([6.0]), asked(), 0)
