import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from msgspec.structs import replace

from omni_async.algorithms.correction.correct import correct, loss_factor, normaliser
from omni_async.algorithms.correction.drift import Drift, effective_sample_size
from omni_async.algorithms.correction.masks import k1_mask, k2_mask, k3_mask, m2po_mask
from omni_async.config.algorithm import Correction


def matrix(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def random_drift(seed, samples=6, steps=3, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    log_ratio = spread * torch.randn(samples, steps, dtype=torch.float64, generator=generator)
    return Drift(log_ratio, torch.rand(samples, steps, dtype=torch.float64, generator=generator))


ONE_ROW_AT_A_TIME = st.builds(
    Correction,
    mode=st.just("decoupled"),
    weights=st.just("importance"),
    cap=st.sampled_from([None, 2.0]),
    band=st.sampled_from([None, (0.5, 3.0)]),
    normalise=st.booleans(),
    kappa_nats=st.sampled_from([None, 0.6]),
    k1=st.sampled_from([None, (0.3, 4.0)]),
    k2=st.sampled_from([None, 1.0]),
    k3=st.sampled_from([None, 1.0]),
    reject_level=st.sampled_from(["step", "sum", "mean", "max"]),
    denominator=st.sampled_from(["kept", "all"]),
)
LEVELS = st.sampled_from(
    [("step", "sum"), ("step", "mean"), ("trajectory", "sum"), ("trajectory", "mean"), ("sequence", "mean")]
)
ONE_ROW_AT_A_TIME = st.builds(
    lambda chosen, level: replace(chosen, level=level[0], log_ratio=level[1]), ONE_ROW_AT_A_TIME, LEVELS
)


def by_the_page(drift, chosen, num_elements):
    """Returns (weight before masks, whether the row is left) of every row, sample by sample, from the formulas of
    docs/algorithms/correction.md."""
    found = []
    for own, kappas in zip(drift.log_ratio.tolist(), drift.kappa.tolist(), strict=True):
        if chosen.log_ratio == "mean":
            own = [value / num_elements for value in own]
        whole = sum(own) / len(own) if chosen.level == "trajectory" and chosen.log_ratio == "mean" else sum(own)
        for L, kappa in zip(own, kappas, strict=True):
            w = math.exp(L if chosen.level == "step" else whole)
            inside = chosen.band is None or chosen.band[0] <= w <= chosen.band[1]
            w = min(w, chosen.cap or math.inf) if inside else 0.0
            kept = inside and (chosen.kappa_nats is None or kappa <= chosen.kappa_nats)
            aggregate = {"step": lambda _, here: here, "sum": lambda row, _: sum(row), "max": lambda row, _: max(row)}
            aggregate["mean"] = lambda row, _: sum(row) / len(row)
            over_steps = aggregate[chosen.reject_level]
            if chosen.k1 is not None:
                low, high = map(math.log, chosen.k1)
                kept &= (
                    (low <= min(own) and max(own) <= high)
                    if chosen.reject_level == "max"
                    else low <= over_steps(own, L) <= high
                )
            if chosen.k2 is not None:
                kept &= over_steps([x * x / 2 for x in own], L * L / 2) <= chosen.k2
            if chosen.k3 is not None:
                kept &= over_steps([math.exp(x) - 1 - x for x in own], math.exp(L) - 1 - L) <= chosen.k3
            found.append((w, kept))
    return found


def test_mode_none_and_plain_bypass_leave_every_row_alone():
    for mode in ("none", "bypass", "decoupled"):
        got = correct(random_drift(0), Correction(mode=mode), 10)
        assert torch.equal(got.weight, torch.ones(6, 3, dtype=torch.float64))
        assert got.kept.all() and got.masked == {} and got.gamma == 1.0
        assert normaliser(got, Correction(mode=mode)) == (18.0, 18.0)


def test_every_rule_masks_under_its_own_name_and_a_row_stays_if_all_keep_it():
    drift = random_drift(1, samples=40)
    chosen = Correction(
        mode="decoupled",
        weights="importance",
        cap=None,
        band=(0.4, 3.0),
        kappa_nats=0.8,
        m2=0.5,
        k1=(0.3, 4.0),
        k2=0.9,
        k3=0.9,
    )
    got = correct(drift, chosen, 10)
    L = drift.log_ratio
    expected = {
        "kappa_nats": drift.kappa > 0.8,
        "m2": ~m2po_mask(L, 0.5),
        "k1": ~k1_mask(L, (0.3, 4.0), "step"),
        "k2": ~k2_mask(L, 0.9, "step"),
        "k3": ~k3_mask(L, 0.9, "step"),
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


def test_bypass_rejects_without_weighing():
    drift = Drift(matrix([0.0, 2.0], [0.1, -0.1]))
    got = correct(drift, Correction(mode="bypass", k1=(0.5, 2.0), reject_level="max"), 10)
    assert got.weight.tolist() == [[0.0, 0.0], [1.0, 1.0]]
    assert got.masked["k1"].tolist() == [[True, True], [False, False]]


def test_log_ratios_per_element_reach_rejection_and_m2_but_not_kappa():
    drift = Drift(matrix([4.0, 0.5]), matrix([4.0, 0.5]))
    chosen = Correction(mode="decoupled", log_ratio="mean", k1=(0.5, 2.0), k2=1.0, k3=1.0, m2=1.0, kappa_nats=1.0)
    got = correct(drift, chosen, 100)
    assert not any(got.masked[name].any() for name in ("k1", "k2", "k3", "m2"))
    assert got.masked["kappa_nats"].tolist() == [[True, False]]
    in_nats = correct(drift, Correction(mode="decoupled", k1=(0.5, 2.0), k2=1.0, k3=1.0, m2=1.0), 100)
    assert all(in_nats.masked[name].tolist() == [[True, False]] for name in ("k1", "k2", "k3", "m2"))


def test_tempering_reports_its_exponent_and_looks_at_the_whole_update():
    drift = random_drift(3, samples=200, spread=3.0)
    chosen = Correction(mode="decoupled", weights="tempered", cap=None, ess_target=0.7)
    got = correct(drift, chosen, 10)
    assert 0 < got.gamma < 1
    torch.testing.assert_close(got.weight, (got.gamma * drift.log_ratio).exp())
    assert effective_sample_size(got.weight.log().flatten()).item() == pytest.approx(0.7, rel=1e-6)
    capped = correct(drift, Correction(mode="decoupled", weights="tempered", ess_target=0.7), 10)
    torch.testing.assert_close(capped.weight, got.weight.clamp(max=2.0))


@pytest.mark.parametrize("level", ["step", "trajectory"])
def test_masked_rows_have_no_say_in_the_tempering_exponent(level):
    """Puts half of the samples at D kappa .1, half at 12, which the mask drops: gamma is that of the first half
    alone."""
    generator = torch.Generator().manual_seed(0)
    kappa = matrix([0.1]).expand(256, 2).clone()
    kappa[::2] = 12.0
    log_ratio = -kappa + (2 * kappa).sqrt() * torch.randn(256, 2, dtype=torch.float64, generator=generator)
    chosen = Correction(mode="decoupled", weights="tempered", kappa_nats=2.0, level=level, ess_target=0.5)
    got = correct(Drift(log_ratio, kappa), chosen, 10)
    assert got.gamma == 1.0  # exp(-2 D kappa) is .82 for a step and .67 for two of them
    dropped = correct(Drift(log_ratio[1::2], kappa[1::2]), chosen, 10)
    assert torch.equal(got.weight[1::2], dropped.weight) and not got.weight[::2].any()
    assert got.masked["kappa_nats"].double().mean() == 0.5


def test_the_tempering_exponent_of_the_rows_that_every_rule_keeps_by_hand():
    """Leaves two rows, at L = 0 and 5: their ESS (1 + e^g)^2 / (2 (1 + e^2g)) is .8 at e^g = 3, whatever was dropped
    beside them."""
    drift = Drift(matrix([0.0, 40.0, -3.0], [5.0, -40.0, 5.1]), matrix([0.0, 0.0, 9.0], [0.0, 0.0, 9.0]))
    chosen = Correction(mode="decoupled", weights="tempered", ess_target=0.8, cap=None, kappa_nats=1.0, k2=100.0)
    got = correct(drift, chosen, 10)
    assert got.kept.tolist() == [[True, False, False]] * 2
    assert got.gamma == pytest.approx(math.log(3) / 5, rel=1e-8)
    torch.testing.assert_close(got.weight, matrix([1.0, 0.0, 0.0], [3.0, 0.0, 0.0]))
    nothing_left = correct(Drift(drift.log_ratio, drift.kappa + 2), chosen, 10)
    assert nothing_left.gamma == 1.0 and not nothing_left.weight.any()
    assert loss_factor(*normaliser(nothing_left, chosen)) == 0.0


@given(ONE_ROW_AT_A_TIME, st.integers(0, 1000))
@hypothesis_settings(max_examples=80, deadline=None)
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


@given(ONE_ROW_AT_A_TIME, st.integers(0, 1000))
@hypothesis_settings(max_examples=60, deadline=None)
def test_the_normalised_loss_is_the_average_that_was_asked_for(chosen, seed):
    drift = random_drift(seed, spread=1.5)
    got = correct(drift, chosen, 4)
    loss = torch.rand(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    total = below = 0.0
    for (weight, kept), value in zip(by_the_page(drift, chosen, 4), loss.flatten().tolist(), strict=True):
        total += weight * value if kept else 0.0
        if kept or chosen.denominator == "all":
            below += weight if chosen.normalise else 1.0
    mean = (got.weight * loss).mean().item() * loss_factor(*normaliser(got, chosen))
    assert mean == pytest.approx(total / below if below else 0.0, rel=1e-12)


def test_with_everything_masked_the_loss_is_zero():
    drift = Drift(matrix([9.0, -9.0]))
    for denominator, normalise in product(("kept", "all"), (False, True)):
        chosen = Correction(
            mode="decoupled", weights="importance", k2=1.0, denominator=denominator, normalise=normalise
        )
        got = correct(drift, chosen, 10)
        assert not got.kept.any() and got.weight.tolist() == [[0.0, 0.0]]
        numerator, below = normaliser(got, chosen)
        factor = loss_factor(numerator, below)
        assert numerator == 2.0
        assert (factor == 0.0) == (denominator == "kept")
        assert factor * got.weight.mean().item() == 0.0


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, False),
        ({"mode": "decoupled", "weights": "importance", "normalise": True, "k1": (0.5, 2.0), "kappa_nats": 1.0}, False),
        ({"mode": "decoupled", "weights": "tempered"}, True),
        ({"mode": "decoupled", "m2": 0.1}, True),
    ],
)
def test_only_tempering_and_m2_need_the_whole_update(chosen, expected):
    assert Correction(**chosen).needs_update is expected


def test_impossible_settings_and_missing_kappa_are_refused():
    with pytest.raises(ValueError, match=r"algorithm\.correction\.weights: .*count twice"):
        correct(random_drift(0), Correction(mode="bypass", weights="importance"), 10)
    with pytest.raises(ValueError, match=r"algorithm\.correction\.kappa_nats needs drift\.kappa"):
        correct(Drift(matrix([0.0])), Correction(mode="decoupled", kappa_nats=0.5), 10)
    with pytest.raises(ValueError, match="num_elements must be >= 1, got 0"):
        correct(random_drift(0), Correction(mode="decoupled"), 0)
