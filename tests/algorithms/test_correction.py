"""Tests off-policy correction against its formulas."""

import math
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from msgspec.structs import replace

from omni_async.algorithms.checks import correction_problems
from omni_async.algorithms.correction import (
    Drift,
    chi2,
    correct,
    interpolated_log_prob,
    k3,
    loss_factor,
    normaliser,
    perplexity_ratio,
)
from omni_async.algorithms.rejection import k1_mask, m2po_mask, statistic_mask
from omni_async.algorithms.tempering import effective_sample_size, tempering_exponent
from omni_async.config.algorithm import Correction, RejectLevels
from tests.algorithms.correction_formulas import (
    ONE_ROW_AT_A_TIME,
    asked,
    by_the_page,
    matrix,
    normal,
    random_drift,
)


def ess(log_weights):
    return effective_sample_size(log_weights).item()


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=20))
@examples(max_examples=50, deadline=None)
def test_the_effective_sample_size_is_its_formula(log_weights):
    weights = [math.exp(value) for value in log_weights]
    expected = (sum(weights) / len(weights)) ** 2 / (sum(w * w for w in weights) / len(weights))
    got = ess(matrix(*log_weights))
    assert got == pytest.approx(expected, rel=1e-12)
    assert 0 < got <= 1


def test_the_effective_sample_size_of_weights_beyond_floating_point_of_none_and_per_column():
    assert ess(matrix(5000.0, 5000.0, -5000.0, -5000.0)) == 0.5
    assert ess(matrix(-1e6, -1e6 + math.log(3.0))) == pytest.approx(16 / 20, rel=1e-9)
    assert ess(matrix(0.0, -math.inf)) == 0.5
    assert ess(matrix(-math.inf, -math.inf)) == 0.0
    values = normal(0, 6, 3)
    columns = torch.stack([effective_sample_size(values[:, step]) for step in range(3)])
    torch.testing.assert_close(effective_sample_size(values), columns, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("log_ratio", "kappa", "message"),
    [
        (torch.zeros(3, dtype=torch.float64), None, r"shape \(N, W\) with N, W >= 1, got \(3,\)"),
        (torch.zeros(1, 2), None, r"log_ratio must be float64 of shape \(1, 2\), got torch.float32"),
        (matrix([0.0, math.nan]), None, "log_ratio must be finite, got nan in sample 0, step 1"),
        (matrix([0.0, 0.0]), matrix([0.0]), r"kappa must be float64 of shape \(1, 2\), got torch.float64 .*\(1, 1\)"),
        (matrix([0.0]), matrix([-0.5]), "kappa must be finite and >= 0, got -0.5 in sample 0, step 0"),
        (matrix([0.0]), None, r"steps must be int64 of shape \(1, 1\), got torch.int64 of shape \(1,\)"),
        (matrix([0.0]).requires_grad_(), None, "log_ratio requires a gradient.*detach"),
    ],
)
def test_drift_that_cannot_be_is_refused(log_ratio, kappa, message):
    steps = torch.tensor([3]) if message.startswith("steps") else None
    with pytest.raises(ValueError, match=message):
        Drift(log_ratio, kappa, steps)


def test_k3_punishes_large_ratios_more_than_small_ones_and_survives_overflow():
    drift = Drift(matrix([2.0, -2.0, 5000.0, -5000.0, 0.0]))
    assert correct(drift, Correction(mode="bypass", k3=2.0), 1).kept.tolist() == [[False, True, False, False, True]]
    with pytest.raises(ValueError, match="level must be 'step', 'sum', 'mean' or 'max', got 'token'"):
        statistic_mask(matrix([0.0]), 1.0, "token")


def most_rows(squares, bound):
    """Returns the largest number of rows whose mean is below the bound, over all subsets."""
    for size in range(len(squares), 0, -1):
        if any(sum(subset) / size < bound for subset in combinations(squares, size)):
            return size
    return 0


@given(st.lists(st.integers(-8, 8), min_size=1, max_size=8), st.integers(1, 40))
@example([2, 2, 2], 4)
@example([2, -2, 2, 0], 3)
@examples(max_examples=100, deadline=None)
def test_m2po_keeps_the_most_rows_that_satisfy_its_bound(quarters, bound_quarters):
    log_ratio, bound = matrix([quarter / 4 for quarter in quarters]), bound_quarters / 16
    keep, squares = m2po_mask(log_ratio, bound), log_ratio.square()
    assert keep.sum() == most_rows(squares.flatten().tolist(), bound)
    if keep.any():
        assert squares[keep].mean() < bound
        assert (keep | (squares >= squares[keep].max())).all()


def test_m2po_keeps_the_first_among_equals_and_survives_overflow():
    assert m2po_mask(matrix([1.0, -1.0], [1.0, 0.0]), 0.7).tolist() == [[True, True], [False, True]]
    assert m2po_mask(matrix([1e200, 0.1]), 1.0).tolist() == [[False, True]]


LOG_RATIOS = st.lists(st.floats(-50, 50), min_size=2, max_size=12).map(lambda values: matrix(*values))


@given(LOG_RATIOS, st.sampled_from([0.13, 0.37, 0.71, 0.93]))
@examples(max_examples=100, deadline=None)
def test_the_exponent_is_the_largest_that_reaches_the_target_since_ess_never_rises_with_it(log_ratio, target):
    gamma = tempering_exponent(log_ratio, target)
    assert 0 < gamma <= 1
    assert ess(gamma * log_ratio) >= target
    if gamma < 1:
        assert ess((gamma * (1 + 1e-6)) * log_ratio) < target
    sizes = [ess(gamma * log_ratio) for gamma in (0.01, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)]
    assert all(after <= before + 1e-12 for before, after in pairwise(sizes))


def test_only_differences_between_log_ratios_count_and_all_of_them_alike_whatever_the_shape():
    log_ratio = 2 * normal(0, 60) - 2
    assert tempering_exponent(log_ratio + 1000.0, 0.7) == pytest.approx(tempering_exponent(log_ratio, 0.7), rel=1e-8)
    assert tempering_exponent(torch.full((4,), -300.0, dtype=torch.float64), 0.99) == 1.0
    assert tempering_exponent(log_ratio.reshape(20, 3), 0.7) == tempering_exponent(log_ratio, 0.7)
    for target in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match=r"ess_target must be in \(0, 1\)"):
            tempering_exponent(log_ratio, target)


@given(ONE_ROW_AT_A_TIME, st.integers(0, 1000), st.sampled_from([1.5, 30.0]))
@examples(max_examples=150, deadline=None)
def test_weights_masks_and_the_normalised_loss_are_those_of_the_formulas(chosen, seed, spread):
    drift = random_drift(seed, spread=spread)
    got = correct(drift, chosen, 4)
    weight, kept = by_the_page(drift, chosen, 4)
    assert (got.gamma == 1.0).all() and torch.equal(got.kept, kept)
    torch.testing.assert_close(got.unmasked, weight, atol=1e-12, rtol=1e-12)
    loss = torch.rand(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    counted = (weight if chosen.normalise else torch.ones_like(weight)) * (kept | (chosen.denominator == "all"))
    expected = (weight * loss * kept).sum() / counted.sum() if counted.any() else 0.0
    mean = (got.weight * loss).mean().item() * loss_factor(*normaliser(got, chosen))
    assert mean == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize(
    ("level", "log_ratio", "exponents"),
    [
        ("trajectory", "sum", [0.5 - 0.75, 0.25, 0.0]),
        ("trajectory", "mean", [(0.5 - 0.75) / 8, 0.25 / 4, 0.0]),
        ("sequence", "mean", [(0.5 - 0.75) / 4, 0.25 / 4, 0.0]),
    ],
)
def test_weights_of_samples_may_be_those_of_their_kept_steps(level, log_ratio, exponents):
    """Masks by kappa 3, 1 and 2 of 3 steps, D = 4; `all` takes the masked steps' L as well."""
    drift = Drift(
        matrix([0.5, 7.0, -0.75], [9.0, 0.25, -8.0], [3.0, 4.0, 5.0]),
        matrix([0.0, 2.0, 0.5], [2.0, 0.0, 2.0], [2.0, 2.0, 2.0]),
    )
    chosen = asked(level=level, log_ratio=log_ratio, kappa_nats=1.0, steps="kept")
    got = correct(drift, chosen, 4)
    expected = matrix(*exponents).exp()[:, None].expand(3, 3)
    torch.testing.assert_close(got.unmasked, expected, atol=0, rtol=1e-14)
    torch.testing.assert_close(got.weight, expected * (drift.kappa <= 1))
    of_all = correct(drift, replace(chosen, steps="all"), 4)
    assert torch.equal(of_all.kept, got.kept) and (of_all.unmasked != got.unmasked).all()
    assert torch.equal(of_all.unmasked, correct(Drift(drift.log_ratio), replace(chosen, kappa_nats=None), 4).unmasked)


def test_tempering_of_kept_steps_ignores_the_masked_ones():
    """Leaves one step of each sample, at L = 0 and 5, as the test of tempering by hand."""
    drift = Drift(matrix([0.0, 40.0], [5.0, -40.0]), matrix([0.0, 9.0], [0.0, 9.0]))
    got = correct(drift, asked(weights="tempered", level="trajectory", ess_target=0.8, kappa_nats=1.0, steps="kept"), 1)
    assert got.gamma == pytest.approx(math.log(3) / 5, rel=1e-8)
    torch.testing.assert_close(got.weight, matrix([1.0, 0.0], [3.0, 0.0]))


@given(ONE_ROW_AT_A_TIME, st.integers(0, 1000))
@examples(max_examples=80, deadline=None)
def test_micro_batches_of_whole_samples_add_up_to_the_update(chosen, seed):
    assert not chosen.needs_update
    drift = random_drift(seed, spread=1.5)
    whole = correct(drift, chosen, 4)
    totals = [0.0, 0.0]
    for samples in (slice(0, 1), slice(1, 4), slice(4, 6)):
        part = correct(Drift(drift.log_ratio[samples], drift.kappa[samples]), chosen, 4)
        assert torch.equal(part.weight, whole.weight[samples])
        assert torch.equal(part.kept, whole.kept[samples])
        assert all(torch.equal(part.masked[name], masked[samples]) for name, masked in whole.masked.items())
        totals = [total + own for total, own in zip(totals, normaliser(part, chosen), strict=True)]
    assert totals == pytest.approx(normaliser(whole, chosen), rel=1e-14)


@pytest.mark.parametrize("mode", ["none", "bypass", "decoupled"])
def test_without_rules_every_row_is_left_alone(mode):
    got = correct(random_drift(0), Correction(mode=mode), 10)
    assert torch.equal(got.weight, torch.ones(6, 3, dtype=torch.float64))
    assert got.kept.all() and got.masked == {} and (got.gamma == 1.0).all()
    assert normaliser(got, Correction(mode=mode)) == (18.0, 18.0)


def test_every_rule_masks_under_its_own_name_and_a_row_stays_if_all_keep_it():
    drift = random_drift(1, samples=40)
    got = correct(drift, asked(band=(0.4, 3.0), kappa_nats=0.8, m2=0.5, k1=(0.3, 4.0), k2=0.9, k3=0.9), 10)
    L = drift.log_ratio
    expected = {
        "kappa_nats": drift.kappa > 0.8,
        "m2": ~m2po_mask(L, 0.5),
        "k1": ~k1_mask(L, (0.3, 4.0), "step")[0],
        "k2": L.square() / 2 > 0.9,
        "k3": L.exp() - 1 - L > 0.9,
        "band": (L.exp() < 0.4) | (L.exp() > 3.0),
    }
    assert got.masked.keys() == expected.keys()
    kept = torch.ones_like(got.kept)
    for name, masked in expected.items():
        assert 0 < masked.sum() < masked.numel(), name
        assert torch.equal(got.masked[name], masked), name
        kept &= ~masked
    assert torch.equal(got.kept, kept) and 0 < kept.sum() < kept.numel()
    torch.testing.assert_close(got.weight, torch.where(kept, L.exp(), 0.0))
    of_rules = {"kappa_nats": drift.kappa, "m2": L**2, "k1": L.abs().exp(), "k2": L**2 / 2, "k3": L.exp() - 1 - L}
    for name, statistic in (of_rules | {"band": L.exp()}).items():
        torch.testing.assert_close(got.statistics[name], statistic)


def test_each_rule_has_its_own_level_and_statistic_of_it():
    drift = Drift(matrix([1.0, -3.0], [0.1, 0.2]))
    rules = Correction(mode="bypass", k1=(0.2, 5.0), k2=4.7, k3=1.0)
    got = correct(drift, replace(rules, reject_level=RejectLevels(k1="sum", k2="max")), 1)
    k3s = [[math.e - 2, math.exp(-3) + 2], [math.exp(0.1) - 1.1, math.exp(0.2) - 1.2]]
    assert {name: masked.tolist() for name, masked in got.masked.items()} == {
        "k1": [[True] * 2, [False] * 2],  # L sums to -2, whose ratio is below .2
        "k2": [[False] * 2] * 2,  # 4.5 and .02
        "k3": [[False, True], [False] * 2],
    }
    sums = matrix([math.exp(2)] * 2, [math.exp(0.3)] * 2)
    for name, statistic in {"k1": sums, "k2": matrix([4.5] * 2, [0.02] * 2), "k3": matrix(*k3s)}.items():
        torch.testing.assert_close(got.statistics[name], statistic)
    far = correct(Drift(matrix([5000.0, -5000.0])), replace(rules, reject_level="max"), 1)
    assert all((value == 1e12).all() for name, value in far.statistics.items() if name != "k2"), "finite, for a mean"
    assert (far.statistics["k2"] == 12.5e6).all()


def test_the_floor_raises_what_the_band_keeps_and_the_cap_leaves():
    drift = Drift(matrix([-3.0, -1.0, -0.1, 0.5, 3.0]))
    got = correct(drift, asked(cap=1.5, floor=0.8), 1)
    torch.testing.assert_close(got.weight, matrix([0.8, 0.8, math.exp(-0.1), 1.5, 1.5]))
    banded = correct(drift, asked(cap=1.5, floor=0.8, band=(0.3, 10.0)), 1)
    torch.testing.assert_close(banded.weight, matrix([0.0, 0.8, math.exp(-0.1), 1.5, 0.0]))
    masked = correct(drift, asked(cap=None, floor=0.8, k1=(0.5, 10.0)), 1)
    torch.testing.assert_close(masked.weight, matrix([0.0, 0.0, math.exp(-0.1), math.exp(0.5), 0.0]))


@given(st.integers(0, 1000), st.sampled_from([0.3, 3.0]))
@examples(max_examples=50, deadline=None)
def test_clamping_tempered_weights_on_either_side_does_not_lower_their_ess(seed, spread):
    drift = random_drift(seed, spread=spread)
    tempered = asked(weights="tempered", ess_target=0.7)
    sizes = [
        ess(correct(drift, replace(tempered, **clamp), 4).weight.flatten().log())
        for clamp in ({}, {"floor": 0.5}, {"floor": 0.5, "cap": 1.5})
    ]
    assert 0.7 <= sizes[0] <= sizes[1] + 1e-9 <= sizes[2] + 2e-9


def test_every_denoising_step_has_the_exponent_that_meets_the_target_on_its_kept_rows():
    """Steps drift by a factor of 8. Columns are positions in a window, and samples have other windows."""
    generator = torch.Generator().manual_seed(3)
    steps = torch.tensor([[0, 1], [1, 2], [0, 2]] * 40)
    log_ratio = torch.tensor([0.5, 1.0, 4.0])[steps] * torch.randn(120, 2, generator=generator).double()
    drift = Drift(log_ratio, torch.rand(120, 2, generator=generator).double(), steps)
    chosen = asked(weights="tempered", tempering="step", kappa_nats=0.8, cap=None)
    got = correct(drift, chosen, 10)
    gammas = []
    for step in range(3):
        rows, own = steps == step, (steps == step) & got.kept
        [gamma] = got.gamma[rows].unique().tolist()
        assert own.sum() < rows.sum()
        assert ess(gamma * log_ratio[own]) == pytest.approx(0.7, rel=1e-6) or gamma == 1.0
        torch.testing.assert_close(got.weight[own], (gamma * log_ratio[own]).exp())
        gammas.append(gamma)
    assert gammas[0] > gammas[1] > gammas[2]
    together = correct(drift, replace(chosen, tempering="update"), 10).gamma[0, 0].item()
    assert gammas[2] < together < gammas[0]
    with pytest.raises(ValueError, match=r"tempering: step needs drift\.steps"):
        correct(Drift(log_ratio, drift.kappa), chosen, 10)


def test_the_estimates_of_the_distance_are_those_of_two_gaussians_and_finite():
    """Draws L ~ N(-D, 2 D): KL D, chi^2 exp(2 D) - 1."""
    distance = 0.1
    log_ratio = -distance + math.sqrt(2 * distance) * normal(0, 200_000)
    assert k3(log_ratio).mean().item() == pytest.approx(distance, rel=0.02)
    assert chi2(log_ratio).mean().item() == pytest.approx(math.exp(2 * distance) - 1, rel=0.02)
    assert 1 / (1 + chi2(log_ratio).mean().item()) == pytest.approx(ess(log_ratio), rel=0.01)
    assert perplexity_ratio(matrix(-1.0, 0.0, 2.0)).tolist() == pytest.approx([math.e, 1.0, math.exp(-2)])
    far = matrix(-1e6, 1e6)
    assert all(function(far).isfinite().all() for function in (k3, chi2, perplexity_ratio))


def test_log_ratios_per_element_reach_rejection_and_m2_but_not_kappa():
    drift = Drift(matrix([4.0, 0.5]), matrix([4.0, 0.5]))
    rules = Correction(mode="decoupled", k1=(0.5, 2.0), k2=1.0, k3=1.0, m2=1.0, kappa_nats=1.0)
    for form, masked in (("sum", [[True, False]]), ("mean", [[False, False]])):
        got = correct(drift, replace(rules, log_ratio=form), 100).masked
        assert all(got[name].tolist() == masked for name in ("k1", "k2", "k3", "m2"))
        assert got["kappa_nats"].tolist() == [[True, False]]


def test_the_tempering_exponent_of_the_rows_that_every_rule_keeps_by_hand():
    """Leaves two rows, at L = 0 and 5: their ESS (1 + e^g)^2 / (2 (1 + e^2g)) is .8 at e^g = 3."""
    drift = Drift(matrix([0.0, 40.0, -3.0], [5.0, -40.0, 5.1]), matrix([0.0, 0.0, 9.0], [0.0, 0.0, 9.0]))
    chosen = asked(weights="tempered", ess_target=0.8, kappa_nats=1.0, k2=100.0)
    got = correct(drift, chosen, 10)
    assert got.kept.tolist() == [[True, False, False]] * 2
    assert got.gamma.tolist() == [[pytest.approx(math.log(3) / 5, rel=1e-8)] * 3] * 2
    torch.testing.assert_close(got.weight, matrix([1.0, 0.0, 0.0], [3.0, 0.0, 0.0]))
    nothing_left = correct(Drift(drift.log_ratio, drift.kappa + 2), chosen, 10)
    assert (nothing_left.gamma == 1.0).all() and not nothing_left.weight.any()
    assert loss_factor(*normaliser(nothing_left, chosen)) == 0.0


def test_only_tempering_and_m2_need_the_whole_update():
    row_by_row = Correction(), asked(normalise=True, k1=(0.5, 2.0), kappa_nats=1.0)
    assert not any(chosen.needs_update for chosen in row_by_row)
    assert asked(weights="tempered").needs_update and asked(m2=0.1).needs_update


@pytest.mark.parametrize(
    ("drift", "chosen", "num_elements", "message"),
    [
        (random_drift(0), {"mode": "none", "weights": "importance"}, 9, r"algorithm\.correction\.weights: .*fresh"),
        (Drift(matrix([0.0])), {"mode": "decoupled", "kappa_nats": 0.5}, 9, r"kappa_nats needs drift\.kappa"),
        (random_drift(0), {"mode": "decoupled"}, 0, "num_elements must be >= 1, got 0"),
    ],
)
def test_impossible_settings_and_missing_kappa_are_refused(drift, chosen, num_elements, message):
    with pytest.raises(ValueError, match=message):
        correct(drift, Correction(**chosen), num_elements)


def test_the_proximal_policy_lies_between_the_other_two_by_version():
    versions = torch.tensor([[6, 5], [4, 3], [6, 7 - 10**9]])  # that took each step, while 7 is being made from 6
    behaviour = matrix([-1.0, -1.5], [-2.0, -2.5], [-0.1234567, -0.5]).requires_grad_()
    current = matrix([-3.0, -3.5], [1.0, 1.5], [-0.2, -0.7]).requires_grad_()
    nats = torch.full_like(behaviour, 1e3)
    got = interpolated_log_prob(behaviour, current, 6 - versions, nats)
    alpha = (7 - 1 - versions.double()) / (7 - versions.double())
    torch.testing.assert_close(got, (behaviour + alpha * (current - behaviour)).detach(), atol=1e-14, rtol=0)
    assert torch.equal(got[:, 0][versions[:, 0] == 6], behaviour[:, 0][versions[:, 0] == 6])
    assert got[2, 1].item() == pytest.approx(-0.7, abs=1e-8)  # old steps approach the current policy
    assert not got.requires_grad
    single = interpolated_log_prob(behaviour.float(), current.float(), 6 - versions, nats)
    assert single.dtype == torch.float32  # interpolated in float64
    exact = interpolated_log_prob(behaviour.float().double(), current.float().double(), 6 - versions, nats)
    assert torch.equal(single, exact.float())


@given(st.integers(0, 1000), st.sampled_from([1.0, 30.0]))
@examples(max_examples=50, deadline=None)
def test_linear_interpolation_is_the_arithmetic_mean_of_the_densities(seed, spread):
    behaviour, current = normal(seed, 6) / 10 - 1, normal(seed + 1, 6) / 10 - 1
    nats = spread * normal(seed + 2, 6).abs() + 0.1
    staleness = torch.tensor([0, 0, 1, 2, 8, 100])
    got = interpolated_log_prob(behaviour, current, staleness, nats, "linear")
    for b, theta, s, scale, value in zip(
        *map(torch.Tensor.tolist, (behaviour, current, staleness, nats, got)), strict=True
    ):
        mixed = (math.exp(scale * b) + s * math.exp(scale * theta)) / (s + 1)
        assert value == pytest.approx(math.log(mixed) / scale, rel=1e-9)
    assert torch.equal(got[:2], behaviour[:2])


def test_linear_interpolation_bounds_both_ratios_at_any_distance():
    behaviour, staleness = torch.zeros(4, dtype=torch.float64), torch.tensor([1, 1, 3, 3])
    nats = torch.full((4,), 65_536.0, dtype=torch.float64)
    current = torch.tensor([5.0, -5.0, 0.01, -0.01], dtype=torch.float64)
    got = nats * interpolated_log_prob(behaviour, current, staleness, nats, "linear")
    expected = [327_680 - math.log(2), -math.log(2), 655.36 + math.log(3 / 4), math.log(1 / 4)]
    assert got.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("current", "staleness", "message"),
    [
        (torch.zeros(3), torch.tensor([0, 0]), r"current must have shape \(2,\) like behaviour, got \(3,\)"),
        (torch.zeros(2), torch.zeros(2), "staleness must be integers, got torch.float32"),
        (torch.zeros(2), torch.tensor([0, -1]), "staleness must be >= 0, got -1"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(current, staleness, message):
    with pytest.raises(ValueError, match=message):
        interpolated_log_prob(torch.zeros(2), current, staleness, torch.ones(2))


K = {"k1": (0.5, 2.0), "k2": 1.0, "k3": 1.0}
DECOUPLED = {"mode": "decoupled", "weights": "importance"}


@pytest.mark.parametrize(
    "fine",
    [
        {},
        {"mode": "none"},
        {"mode": "bypass", **K, "reject_level": "max"},
        {"mode": "bypass", "denominator": "all"},
        {"mode": "decoupled", "weights": "tempered", "normalise": True, "kappa_nats": 0.5, "m2": 0.1, **K},
        {**DECOUPLED, "band": (0.5, 2.0), "level": "trajectory", "log_ratio": "mean"},
        {"mode": "interpolated", "weights": "tempered", "m2": 0.1, **K},
        {**DECOUPLED, "level": "sequence", "log_ratio": "mean"},
        {"mode": "decoupled", "weights": "tempered", "level": "sequence", "log_ratio": "mean"},
        {"mode": "decoupled", "weights": "tempered", "tempering": "step", "floor": 0.1, "cap": None},
        {**DECOUPLED, "floor": 0.6, "band": (0.5, 2.0)},
        {"mode": "interpolated", "interpolation": "linear", **K, "reject_level": RejectLevels(k1="step", k2="sum")},
    ],
)
def test_combinations_that_work_have_no_problem(fine):
    assert list(correction_problems(Correction(**fine))) == []


@pytest.mark.parametrize(
    ("wrong", "key", "reason", "instead"),
    [
        ({"mode": "bypass", "weights": "importance"}, "weights", "count twice", "decoupled"),
        ({"mode": "bypass", "kappa_nats": 0.5}, "kappa_nats", "knows no proximal policy", "k1, k2 or k3"),
        ({"mode": "bypass", "m2": 0.1}, "m2", "knows no proximal policy", "k1, k2 or k3"),
        ({"mode": "none", "weights": "tempered"}, "weights", "as if they were fresh", "decoupled"),
        *(
            ({"mode": "none", name: value}, name, "masks nothing", "null")
            for name, value in {"kappa_nats": 0.5, "m2": 0.5, "k1": (0.5, 2.0), "k2": 0.5, "k3": 0.5}.items()
        ),
        ({"mode": "interpolated", "kappa_nats": 0.5}, "kappa_nats", "no proximal mean", "decoupled"),
        ({"k1": (0.5, 2.0)}, "k1", "mode auto decides", "decoupled"),
        ({"mode": "bypass", "k1": (2.0, 0.5)}, "k1", r"\[2.0, 0.5\] is no interval", "lo < hi"),
        ({**DECOUPLED, "band": (2.0, 0.5)}, "band", "is no interval", "lo < hi"),
        ({"mode": "decoupled", "weights": "tempered", "band": (0.5, 2.0)}, "band", "bounds the spread", "cap"),
        ({"mode": "decoupled", "band": (0.5, 2.0)}, "band", "weights is none", "importance"),
        ({**DECOUPLED, "level": "sequence"}, "level", "per element, and log_ratio is sum", "trajectory"),
        ({"mode": "decoupled", "normalise": True}, "normalise", "nothing to normalise", "kept"),
        ({"mode": "bypass", "floor": 0.5}, "floor", "weights is none", "importance"),
        ({**DECOUPLED, "floor": 0.9, "cap": 0.9}, "floor", "0.9 is not below cap, 0.9", "lower floor"),
        ({**DECOUPLED, "floor": 0.5, "band": (0.5, 2.0)}, "floor", "0.5 raises no weight", "inside the band"),
        ({"mode": "decoupled", "interpolation": "linear"}, "interpolation", "decoupled interpolates", "interpolated"),
        ({**DECOUPLED, "tempering": "step"}, "tempering", "no exponent is chosen", "tempered"),
        (
            {"mode": "decoupled", "weights": "tempered", "tempering": "step", "level": "trajectory"},
            "tempering",
            "level is trajectory: .*share a weight",
            "level: step",
        ),
        (
            {"mode": "bypass", "k2": 1.0, "reject_level": RejectLevels(k2="sum", k3="max")},
            "reject_level.k3",
            "max is the level of k3, which is null",
            "a bound k3",
        ),
    ],
)
def test_a_combination_that_cannot_work_has_one_message_with_key_reason_and_remedy(wrong, key, reason, instead):
    (message,) = correction_problems(Correction(**wrong))
    with pytest.raises(ValueError, match=rf"^algorithm\.correction\.{key}: .*{reason}.*; use .*{instead}"):
        raise ValueError(message)


def test_an_objective_without_a_ratio_takes_weights_and_every_mask_in_mode_bypass():
    chosen = Correction(mode="bypass", weights="tempered", kappa_nats=0.5, m2=0.1, k1=(0.5, 2.0))
    assert list(correction_problems(chosen, ratio=False)) == []


def test_every_problem_is_reported():
    wrong = Correction(mode="bypass", weights="tempered", kappa_nats=0.5, m2=0.1, band=(2.0, 0.5), k1=(3.0, 1.0))
    keys = [message.split(":")[0].rsplit(".", 1)[1] for message in correction_problems(wrong)]
    assert keys == ["weights", "kappa_nats", "m2", "band", "k1", "band"]
