"""Tests the statistics of evaluations against closed forms, published tables and simulation."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from omni_async.commands.evaluation.statistics import clustered_mean, holm, paired_test


def test_samples_of_a_prompt_count_as_one_observation() -> None:
    # By hand: mean 4; sums of residuals -5, -1 and 6; se = sqrt(3 / 2 * 62) / 6, the number that an ordinary
    # regression on a constant with cluster-robust errors gives.
    found = clustered_mean([1, 2, 3, 4, 5, 9], [7, 7, 8, 8, 9, 9])
    assert (found.mean, found.samples, found.prompts) == (4.0, 6, 3)
    assert found.se == pytest.approx(1.6072751)
    assert (found.low, found.high) == pytest.approx((4 - 4.302653 * 1.6072751, 4 + 4.302653 * 1.6072751), rel=1e-6)


def test_with_one_sample_per_prompt_it_is_the_standard_error_of_a_mean() -> None:
    x = np.random.default_rng(0).normal(size=9)
    assert clustered_mean(x, range(9)).se == pytest.approx(x.std(ddof=1) / 3)


def test_samples_that_only_repeat_their_prompt_make_the_interval_no_narrower() -> None:
    x = np.random.default_rng(1).normal(size=8)
    once, often = clustered_mean(x, range(8)), clustered_mean(np.repeat(x, 50), np.repeat(range(8), 50).tolist())
    assert (often.se, often.low, often.high) == pytest.approx((once.se, once.low, once.high))


def test_one_prompt_has_a_mean_and_no_interval() -> None:
    found = clustered_mean([1.0, 3.0], [0, 0])
    assert (found.mean, found.se, found.low, found.high) == (2.0, None, None, None)


def test_values_without_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="got 2 and 1"):
        clustered_mean([1.0, 2.0], [0])
    with pytest.raises(ValueError, match="got 0 and 0"):
        clustered_mean([], [])


def test_the_interval_covers_the_mean_as_often_as_it_says_and_one_that_ignores_prompts_does_not() -> None:
    draws = np.random.default_rng(2)
    prompts, samples, trials = 8, 4, 2000
    labels = np.repeat(np.arange(prompts), samples)
    covered = naive = 0
    for _ in range(trials):
        x = np.repeat(draws.normal(size=prompts), samples) + draws.normal(scale=0.5, size=len(labels))
        one, other = clustered_mean(x, labels.tolist()), clustered_mean(x, range(len(x)))
        covered += one.low <= 0 <= one.high  # type: ignore[operator]
        naive += other.low <= 0 <= other.high  # type: ignore[operator]
    # 95 % of 2000 trials, give or take three standard errors of 0.5 %.
    assert covered / trials == pytest.approx(0.95, abs=0.015)
    assert naive / trials < 0.75


def test_p_is_the_share_of_all_signs_that_are_as_far_from_zero() -> None:
    differences = [0.4, 0.1, -0.2, 0.5, 0.3]
    found = paired_test(differences, range(5))
    reach = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in product((1, -1), repeat=5)]
    assert found.p == sum(one >= 1.1 - 1e-9 for one in reach) / 32 == 6 / 32
    assert found.exact and found.difference is not None and found.difference.mean == pytest.approx(0.22)


def test_six_prompts_that_all_improve_give_the_smallest_p() -> None:
    assert paired_test([1, 2, 3, 4, 5, 6], range(6)).p == 2 / 64
    assert paired_test([1] * 5, range(5)).p == 2 / 32


def test_samples_of_a_prompt_change_their_sign_together() -> None:
    # 20 samples, but 2 prompts: no evidence at all.
    assert paired_test([1.0] * 20, [0] * 10 + [1] * 10).p == 0.5


def test_no_difference_has_p_one_and_no_shared_sample_has_none() -> None:
    assert paired_test([0.0] * 20, range(20)).p == 1.0
    nothing = paired_test([], [])
    assert (nothing.p, nothing.difference) == (None, None)


def test_drawn_signs_agree_with_the_normal_approximation_and_are_those_of_the_seed() -> None:
    x = np.random.default_rng(3).normal(0.25, 1.0, size=100)
    found = paired_test(x, range(100), seed=5)
    z = abs(x.sum()) / math.sqrt(np.square(x).sum())
    assert not found.exact
    assert found.p == pytest.approx(math.erfc(z / math.sqrt(2)), abs=0.005)
    assert found == paired_test(x, range(100), seed=5)
    assert found.p != paired_test(x, range(100), seed=6).p


def test_drawn_signs_never_give_p_zero() -> None:
    assert paired_test([1.0] * 40, range(40)).p == 1 / 100_001


def test_models_that_do_not_differ_are_told_apart_no_more_often_than_the_level() -> None:
    draws = np.random.default_rng(4)
    labels = np.repeat(np.arange(10), 3).tolist()
    trials = [np.repeat(draws.normal(size=10), 3) + draws.normal(size=30) for _ in range(1000)]
    false = np.mean([(paired_test(x, labels).p or 0) <= 0.05 for x in trials])
    assert false == pytest.approx(0.05, abs=0.021)  # three standard errors of 0.7 %


def test_p_values_are_corrected_for_their_number() -> None:
    # 4 * 0.01; then 3 * 0.02, raised to no less than that before it; 2 * 0.03; 1 * 0.04, raised.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.7, 0.6]) == [1.0, 1.0]
    assert holm([0.03]) == [0.03]
    assert holm([]) == []
