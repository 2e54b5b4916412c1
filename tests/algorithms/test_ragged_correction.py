"""Tests the correction of answers of several lengths against each answer alone; padded places hold what none reads."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from msgspec.structs import replace

from omni_async.algorithms.correction import Drift, correct, loss_factor, normaliser, padded
from omni_async.config.algorithm import Correction
from tests.algorithms.correction_formulas import ONE_ROW_AT_A_TIME, asked, by_the_page, matrix, random_drift

LENGTHS = st.lists(st.integers(1, 7), min_size=2, max_size=6).filter(lambda lengths: min(lengths) < max(lengths))
UPDATE = Correction(mode="decoupled", weights="tempered", m2=0.6, cap=None)


def ragged(lengths, seed, spread=1.0):
    """Returns a drift with NaN in padded places, and the drift of each answer alone."""
    alone = [random_drift(seed + i, 1, length, spread) for i, length in enumerate(lengths)]
    shape = len(lengths), max(lengths)
    log_ratio, kappa = (torch.full(shape, math.nan, dtype=torch.float64) for _ in range(2))
    valid, steps = torch.zeros(shape, dtype=torch.bool), torch.full(shape, 99)
    for i, (length, one) in enumerate(zip(lengths, alone, strict=True)):
        log_ratio[i, :length], kappa[i, :length] = one.log_ratio[0], one.kappa[0]
        valid[i, :length], steps[i, :length] = True, torch.arange(length) % 2
    return Drift(log_ratio, kappa, steps, valid), alone


def joined(drifts):
    """Returns all places of these answers as one answer."""
    return Drift(torch.cat([d.log_ratio for d in drifts], 1), torch.cat([d.kappa for d in drifts], 1))


@given(ONE_ROW_AT_A_TIME, LENGTHS, st.integers(0, 1000), st.sampled_from([1.5, 30.0]))
@examples(max_examples=150, deadline=None)
def test_each_answer_is_corrected_as_if_it_were_alone(chosen, lengths, seed, spread):
    drift, alone = ragged(lengths, seed, spread)
    got = correct(drift, chosen, 4)
    for i, (length, one) in enumerate(zip(lengths, alone, strict=True)):
        weight, kept = by_the_page(one, chosen, 4)
        torch.testing.assert_close(got.unmasked[i, :length], weight[0], atol=1e-12, rtol=1e-12)
        assert torch.equal(got.kept[i, :length], kept[0])
        own = correct(one, chosen, 4)
        for name, values in own.statistics.items():
            torch.testing.assert_close(got.statistics[name][i, :length], values[0], atol=1e-12, rtol=1e-12)
            assert torch.equal(got.masked[name][i, :length], own.masked[name][0])
    for values in (got.weight, got.unmasked, got.kept, *got.masked.values(), *got.statistics.values()):
        assert not values[~drift.valid].any()


@given(ONE_ROW_AT_A_TIME, LENGTHS, st.integers(0, 1000))
@examples(max_examples=80, deadline=None)
def test_the_normalised_loss_and_the_metrics_are_those_of_valid_places(chosen, lengths, seed):
    drift, alone = ragged(lengths, seed, spread=1.5)
    got, each = correct(drift, chosen, 4), [by_the_page(one, chosen, 4) for one in alone]
    weight, kept = (torch.cat([one[part][0] for one in each]) for part in (0, 1))
    counted = (weight if chosen.normalise else torch.ones_like(weight)) * (kept | (chosen.denominator == "all"))
    assert normaliser(got, chosen) == pytest.approx((sum(lengths), counted.sum().item()), rel=1e-12)
    share = torch.tensor([1 / length for length in lengths for _ in range(length)], dtype=torch.float64)
    of_answers = normaliser(got, chosen, 1 / torch.tensor(lengths).double()[:, None].expand_as(got.weight))
    assert of_answers == pytest.approx((len(lengths), (share * counted).sum().item()), rel=1e-12)
    metrics = got.metrics()
    for rule, masked in got.masked.items():
        share = masked.sum().item() / sum(lengths)
        assert metrics[f"masked/{rule}"].mean().item() == pytest.approx(share, rel=1e-14)
        assert torch.equal(metrics[f"statistic/{rule}/mean"], got.statistics[rule][drift.valid])


@given(LENGTHS, st.integers(0, 1000), st.sampled_from([0.5, 2.0]))
@examples(max_examples=60, deadline=None)
def test_m2po_and_tempering_judge_valid_places_alone(lengths, seed, spread):
    drift, alone = ragged(lengths, seed, spread)
    got, flat = correct(drift, UPDATE, 1), correct(joined(alone), UPDATE, 1)
    for name in ("weight", "unmasked", "kept"):
        assert torch.equal(getattr(got, name)[drift.valid], getattr(flat, name)[0])
    assert torch.equal(got.masked["m2"][drift.valid], flat.masked["m2"][0])
    assert (got.gamma == flat.gamma[0, 0]).all(), "a mean over all places is the exponent"
    assert normaliser(got, UPDATE) == pytest.approx(normaliser(flat, UPDATE), rel=1e-14)
    means = [one.log_ratio.mean().item() for one in alone for _ in one.log_ratio[0]]
    of_means = correct(Drift(matrix(means)), replace(UPDATE, m2=None), 1)
    of_answers = correct(drift, replace(UPDATE, m2=None, level="trajectory", log_ratio="mean"), 1)
    torch.testing.assert_close(of_answers.weight[drift.valid], of_means.weight[0], atol=0, rtol=1e-8)


def test_tempering_per_step_and_padding_that_would_change_the_exponent():
    drift, alone = ragged([5, 40, 9], 3, spread=1.5)
    flat = joined(alone)
    steps = torch.cat([torch.arange(length) % 2 for length in (5, 40, 9)])[None]
    per_step = replace(UPDATE, m2=None, tempering="step")
    got = correct(drift, per_step, 1)
    expected = correct(Drift(flat.log_ratio, None, steps), per_step, 1)
    assert torch.equal(got.weight[drift.valid], expected.weight[0])
    assert torch.equal(got.gamma[drift.valid], expected.gamma[0])
    tempered = replace(UPDATE, m2=None)
    filled = correct(Drift(drift.log_ratio), tempered, 1).gamma[0, 0]
    assert correct(drift, tempered, 1).gamma[0, 0] < filled < 1


@given(ONE_ROW_AT_A_TIME | st.just(UPDATE), st.integers(0, 1000))
@examples(max_examples=60, deadline=None)
def test_without_padding_nothing_changes_in_a_bit(chosen, seed):
    plain = random_drift(seed, spread=1.5)
    whole = Drift(plain.log_ratio, plain.kappa, valid=torch.ones(6, 3, dtype=torch.bool))
    one, other = correct(plain, chosen, 4), correct(whole, chosen, 4)
    for name in ("weight", "unmasked", "kept", "gamma"):
        assert torch.equal(getattr(one, name), getattr(other, name))
    assert normaliser(one, chosen) == normaliser(other, chosen)
    assert all(torch.equal(values, other.metrics()[name]) for name, values in one.metrics().items())


def test_values_of_tokens_become_rows_and_back():
    values = torch.arange(1.0, 7.0, dtype=torch.float64)
    rows, valid = padded(values, torch.tensor([2, 1, 3]))
    assert rows.tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]]
    assert torch.equal(rows[valid], values)


def test_a_band_above_1_and_an_answer_without_kept_tokens():
    """Padding of 0 would be the smallest log-ratio of an answer, below a band from 1.1, and a mean of all places."""
    log_ratio, valid = padded(matrix(0.2, 0.3, 0.2, 5.0, 0.3, 0.2), torch.tensor([2, 1, 3]))
    drift = Drift(log_ratio, valid=valid)
    for level, kept in (("max", [2, 1, 0]), ("mean", [2, 1, 0]), ("step", [2, 1, 2])):
        chosen = Correction(mode="bypass", k1=(1.1, 1.5), reject_level=level)
        assert correct(drift, chosen, 1).kept.sum(1).tolist() == kept
    nothing = correct(drift, asked(k1=(90.0, 99.0)), 1)
    assert not nothing.weight.any() and loss_factor(*normaliser(nothing, asked())) == 0.0


@pytest.mark.parametrize(
    ("valid", "got"),
    [
        (torch.ones(2, 2, dtype=torch.bool), r"torch\.bool of shape \(2, 2\)"),
        (torch.ones(2, 3), r"torch\.float32 of shape \(2, 3\)"),
        (torch.tensor([[True, True, True], [False, False, False]]), r"torch\.bool of shape \(2, 3\)"),
    ],
)
def test_masks_that_cannot_be_are_refused(valid, got):
    with pytest.raises(
        ValueError, match=rf"valid must be bool of shape \(2, 3\), true somewhere in every .* got {got}"
    ):
        Drift(torch.zeros(2, 3, dtype=torch.float64), valid=valid)


def test_values_of_valid_places_must_be_finite():
    values = matrix([0.0, math.nan], [math.inf, math.nan])
    with pytest.raises(ValueError, match="log_ratio must be finite, got inf in sample 1, step 0"):
        Drift(values, valid=torch.tensor([[True, False], [True, False]]))
