import math
from itertools import combinations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omni_async.algorithms.correction.masks import k1_mask, k2_mask, k3_mask, kappa_mask, m2po_mask

LEVELS = ("step", "sum", "mean", "max")


def matrix(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def naive(rows, level, accepts, statistic):
    """Applies a rule row by row with Python numbers."""
    kept = []
    for row in rows.tolist():
        values = [statistic(number) for number in row]
        if level == "step":
            kept.append([accepts(value) for value in values])
            continue
        if level == "max":
            fine = all(accepts(value) for value in values)
        else:
            fine = accepts(sum(values) if level == "sum" else sum(values) / len(values))
        kept.append([fine] * len(row))
    return torch.tensor(kept)


@pytest.mark.parametrize("level", LEVELS)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_rejection_statistics_are_their_formulas(level, samples, steps, seed):
    log_ratio = torch.randn(samples, steps, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    expected = naive(log_ratio, level, lambda value: math.log(0.4) <= value <= math.log(2.0), lambda value: value)
    assert torch.equal(k1_mask(log_ratio, (0.4, 2.0), level), expected)
    expected = naive(log_ratio, level, lambda value: value <= 0.3, lambda value: value**2 / 2)
    assert torch.equal(k2_mask(log_ratio, 0.3, level), expected)
    expected = naive(log_ratio, level, lambda value: value <= 0.3, lambda value: math.exp(value) - 1 - value)
    assert torch.equal(k3_mask(log_ratio, 0.3, level), expected)


def test_k3_punishes_large_ratios_more_than_small_ones_and_survives_overflow():
    assert k3_mask(matrix([2.0, -2.0, 5000.0, -5000.0, 0.0]), 2.0, "step").tolist() == [
        [False, True, False, False, True]
    ]


def test_kappa_keeps_its_bound():
    assert kappa_mask(matrix([0.0, 0.5, 0.5000001]), 0.5).tolist() == [[True, True, False]]


def test_unknown_levels_are_refused():
    with pytest.raises(ValueError, match="level must be 'step', 'sum', 'mean' or 'max', got 'token'"):
        k2_mask(matrix([0.0]), 1.0, "token")


def most_rows(squares, bound):
    """Returns the largest number of rows whose mean is below the bound, over all subsets."""
    for size in range(len(squares), 0, -1):
        if any(sum(subset) / size < bound for subset in combinations(squares, size)):
            return size
    return 0


@given(st.lists(st.integers(-8, 8), min_size=1, max_size=8), st.integers(1, 40))
@example([2, 2, 2], 4)
@example([2, -2, 2, 0], 3)
@settings(max_examples=100, deadline=None)
def test_m2po_keeps_the_most_rows_that_satisfy_its_bound(quarters, bound_quarters):
    log_ratio = matrix([quarter / 4 for quarter in quarters])
    bound = bound_quarters / 16
    keep = m2po_mask(log_ratio, bound)
    squares = log_ratio.square()
    assert keep.sum() == most_rows(squares.flatten().tolist(), bound)
    if keep.any():
        assert squares[keep].mean() < bound
        assert (keep | (squares >= squares[keep].max())).all()


def test_among_equals_m2po_keeps_those_that_come_first():
    assert m2po_mask(matrix([1.0, -1.0], [1.0, 0.0]), 0.7).tolist() == [[True, True], [False, True]]


def test_m2po_keeps_everything_or_nothing_at_the_extremes():
    log_ratio = matrix([1.0, -2.0])
    assert m2po_mask(log_ratio, 2.6).tolist() == [[True, True]]
    assert m2po_mask(log_ratio, 1.0).tolist() == [[False, False]]
    assert m2po_mask(matrix([1e200, 0.1]), 1.0).tolist() == [[False, True]]
