import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_async.algorithms.correction.drift import effective_sample_size
from omni_async.algorithms.correction.tempering import tempering_exponent


def gaussian(variance, count=20_000, seed=0):
    """Draws log-ratios as between Gaussians of equal width: mean -variance / 2."""
    noise = torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return -variance / 2 + math.sqrt(variance) * noise


def ess(log_weights):
    return effective_sample_size(log_weights).item()


LOG_RATIOS = st.lists(st.floats(-50, 50), min_size=2, max_size=12).map(
    lambda values: torch.tensor(values, dtype=torch.float64)
)


@given(LOG_RATIOS, st.sampled_from([0.13, 0.37, 0.71, 0.93]))
@settings(max_examples=100, deadline=None)
def test_the_exponent_is_the_largest_that_reaches_the_target(log_ratio, target):
    gamma = tempering_exponent(log_ratio, target)
    assert 0 < gamma <= 1
    assert ess(gamma * log_ratio) >= target
    if gamma < 1:
        assert ess((gamma * (1 + 1e-6)) * log_ratio) < target


@given(LOG_RATIOS)
@settings(max_examples=50, deadline=None)
def test_the_effective_sample_size_never_rises_with_the_exponent(log_ratio):
    sizes = [ess(gamma * log_ratio) for gamma in (0.01, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)]
    assert all(after <= before + 1e-12 for before, after in pairwise(sizes))


@pytest.mark.parametrize("target", [0.3, 0.7, 0.95])
@pytest.mark.parametrize("variance", [0.5, 4.0, 50.0])
def test_tempered_gaussian_weights_reach_the_target_and_agree_with_the_closed_form(variance, target):
    log_ratio = gaussian(variance)
    gamma = tempering_exponent(log_ratio, target)
    closed = min(1.0, math.sqrt(-math.log(target) / variance))  # ESS = exp(-gamma^2 variance)
    if closed < 1:
        assert ess(gamma * log_ratio) == pytest.approx(target, rel=0.05)
    assert gamma == pytest.approx(closed, rel=0.05)


def test_only_differences_between_log_ratios_count():
    log_ratio = gaussian(4.0, count=100)
    assert tempering_exponent(log_ratio + 1000.0, 0.7) == pytest.approx(tempering_exponent(log_ratio, 0.7), rel=1e-8)
    assert tempering_exponent(torch.full((4,), -300.0, dtype=torch.float64), 0.99) == 1.0


def test_all_entries_count_alike_whatever_the_shape():
    log_ratio = gaussian(4.0, count=60)
    assert tempering_exponent(log_ratio.reshape(20, 3), 0.7) == tempering_exponent(log_ratio, 0.7)


@pytest.mark.parametrize("target", [0.0, 1.0, math.nan])
def test_a_target_outside_the_unit_interval_is_refused(target):
    with pytest.raises(ValueError, match=r"ess_target must lie in \(0, 1\)"):
        tempering_exponent(gaussian(1.0, 3), target)
