"""Tests the statistics of evaluations against closed forms, published tables and simulation."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from omni_async.commands.evaluation.statistics import clustered_mean, holm, paired_test


def test_samples_of_a_prompt_count_as_one_observation():
    # By hand: mean 4; sums of residuals -5, -1 and 6; se = sqrt(3 / 2 * 62) / 6, the number that an ordinary
    # regression on a constant with cluster-robust errors gives.
    found = clustered_mean([1, 2, 3, 4, 5, 9], [7, 7, 8, 8, 9, 9])
    assert (found.mean, found.samples, found.prompts) == (4.0, 6, 3)
    assert found.se == pytest.approx(1.6072751)
    assert (found.low, found.high) == pytest.approx((4 - 4.302653 * 1.6072751, 4 + 4.302653 * 1.6072751), rel=1e-6)


def test_an_interval_is_over_prompts():
    x = np.random.default_rng(0).normal(size=9)
    once, often = clustered_mean(x, range(9)), clustered_mean(np.repeat(x, 50), np.repeat(range(9), 50).tolist())
    assert once.se == pytest.approx(x.std(ddof=1) / 3)
    assert (often.se, often.low, often.high) == pytest.approx((once.se, once.low, once.high))
    one = clustered_mean([1.0, 3.0], [0, 0])
    assert (one.mean, one.se, one.low, one.high) == (2.0, None, None, None)
    for values, prompts in (([1.0, 2.0], [0]), ([], [])):
        with pytest.raises(ValueError, match=f"got {len(values)} and {len(prompts)}"):
            clustered_mean(values, prompts)


def test_the_interval_covers_the_mean_as_often_as_it_should():
    draws = np.random.default_rng(2)
    prompts, samples, trials = 8, 4, 2000
    labels = np.repeat(np.arange(prompts), samples)
    covered = naive = 0
    for _ in range(trials):
        x = np.repeat(draws.normal(size=prompts), samples) + draws.normal(scale=0.5, size=len(labels))
        one, other = clustered_mean(x, labels.tolist()), clustered_mean(x, range(len(x)))
        covered += one.low <= 0 <= one.high
        naive += other.low <= 0 <= other.high
    # 95 % of 2000 trials, give or take three standard errors of 0.5 %.
    assert covered / trials == pytest.approx(0.95, abs=0.015)
    assert naive / trials < 0.75


def test_p_is_the_share_of_all_signs_that_are_as_far_from_zero():
    differences = [0.4, 0.1, -0.2, 0.5, 0.3]
    found = paired_test(differences, range(5))
    reach = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in product((1, -1), repeat=5)]
    assert found.p == sum(one >= 1.1 - 1e-9 for one in reach) / 32 == 6 / 32
    assert found.exact and found.difference is not None and found.difference.mean == pytest.approx(0.22)


def test_exact_p_of_known_cases():
    assert paired_test([1, 2, 3, 4, 5, 6], range(6)).p == 2 / 64
    assert paired_test([1] * 5, range(5)).p == 2 / 32
    assert paired_test([1.0] * 20, [0] * 10 + [1] * 10).p == 0.5, "two prompts, no evidence at all"
    assert paired_test([0.0] * 20, range(20)).p == 1.0
    nothing = paired_test([], [])
    assert (nothing.p, nothing.difference) == (None, None)


def test_drawn_signs_agree_with_the_normal_approximation():
    x = np.random.default_rng(3).normal(0.25, 1.0, size=100)
    found = paired_test(x, range(100), seed=5)
    z = abs(x.sum()) / math.sqrt(np.square(x).sum())
    assert not found.exact
    assert found.p == pytest.approx(math.erfc(z / math.sqrt(2)), abs=0.005)
    assert found == paired_test(x, range(100), seed=5)
    assert found.p != paired_test(x, range(100), seed=6).p
    assert paired_test([1.0] * 40, range(40)).p == 1 / 100_001, "never 0"


def test_equal_models_differ_no_more_often_than_the_level():
    draws = np.random.default_rng(4)
    labels = np.repeat(np.arange(10), 3).tolist()
    trials = [np.repeat(draws.normal(size=10), 3) + draws.normal(size=30) for _ in range(1000)]
    false = np.mean([(paired_test(x, labels).p or 0) <= 0.05 for x in trials])
    assert false == pytest.approx(0.05, abs=0.021)  # three standard errors of 0.7 %


def test_p_values_are_corrected_for_their_number():
    # 4 * 0.01; then 3 * 0.02, raised to no less than that before it; 2 * 0.03; 1 * 0.04, raised.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.7, 0.6]) == [1.0, 1.0]
    assert holm([0.03]) == [0.03]
    assert holm([]) == []
