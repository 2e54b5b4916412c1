"""Tests corrections that look at the whole update: weights computed from all groups on all ranks go to the ranks of
their samples."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from actor_world import REWARDS, AccountingRank, make_config, make_group, make_update, run_update
from msgspec.structs import replace

from omni_async.types import SampleDrift

# Log-ratios in nats of group g, sample i, trained step k: no two are alike, so that no two can be confused.
DRIFTS = [[[1.8 - g + 0.62 * i, 0.34 * g - 0.8 - 0.46 * i * (i + 1)] for i in range(4)] for g in range(2)]
LOG_RATIOS = torch.tensor(DRIFTS, dtype=torch.float64)  # (groups, samples, steps)
ELEMENTS = 24


def drifts(kappa: bool = False) -> dict[str, SampleDrift]:
    return {
        f"trajectory {g}.{i}": SampleDrift(tuple(row), tuple(abs(x) for x in row) if kappa else None, ELEMENTS)
        for g, group in enumerate(DRIFTS)
        for i, row in enumerate(group)
    }


def weigh(
    world: int = 1, kappa: bool = False, *, advantages: bool = False, **changes: Any
) -> tuple[list[AccountingRank], dict[str, float]]:
    ranks = [AccountingRank(rank=r, world=world, drifts=drifts(kappa)) for r in range(world)]
    config = make_config(**{"trainer.workers": world, "algorithm.advantage": {"std": "none"}, **changes})
    metrics = run_update(config, ranks, [make_group(i, values) for i, values in enumerate(REWARDS[:2])])
    return ranks, metrics


def weights_of(rank: AccountingRank) -> torch.Tensor:
    """Returns the weights (groups, samples, steps)."""
    return torch.tensor([batch.weights for batch in rank.batches], dtype=torch.float64)


def effective_sample_size(weights: torch.Tensor) -> float:
    return (weights.sum() ** 2 / (weights.numel() * (weights**2).sum())).item()


def test_weights_and_advantages_are_given_together_and_the_looks_before_have_neither():
    [rank], _ = weigh(**{"algorithm.correction": {"mode": "decoupled", "weights": "tempered"}})
    assert [batch.advantages for batch in rank.recomputed] == [(0.0,) * 4] * 2
    assert all(batch.weights is None for batch in rank.recomputed)
    for looked, trained in zip(rank.recomputed, rank.batches, strict=True):
        assert replace(looked, advantages=trained.advantages, weights=trained.weights) == trained


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("target", [0.5, 0.9])
def test_tempered_weights_leave_the_wanted_sample_size_of_the_whole_update(world, target):
    settings = {"mode": "decoupled", "weights": "tempered", "ess_target": target, "cap": None}
    ranks, metrics = weigh(world, **{"algorithm.correction": settings})
    gamma = metrics["gamma"]
    assert 0 < gamma < 1
    expected = (gamma * LOG_RATIOS).exp()
    assert effective_sample_size(expected) == pytest.approx(target, rel=1e-6)
    for rank in ranks:
        torch.testing.assert_close(weights_of(rank), expected / expected.mean(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("denominator", ["kept", "all"])
def test_the_sample_size_is_that_of_the_rows_no_mask_drops(world, denominator):
    settings = {
        "mode": "decoupled",
        "weights": "tempered",
        "ess_target": 0.9,
        "cap": None,
        "kappa_nats": 3.0,
        "denominator": denominator,
    }
    ranks, metrics = weigh(world, kappa=True, **{"algorithm.correction": settings})
    kept = LOG_RATIOS.abs() <= 3.0
    assert 4 < kept.sum() < 14
    gamma = metrics["gamma"]
    tempered = (gamma * LOG_RATIOS).exp()
    assert 0 < gamma < 1 and effective_sample_size(tempered[kept]) == pytest.approx(0.9, rel=1e-6)
    below = tempered[kept].sum() if denominator == "kept" else tempered.sum()
    for rank in ranks:
        torch.testing.assert_close(weights_of(rank), torch.where(kept, tempered, 0.0) * 16 / below, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ({}, LOG_RATIOS),
        ({"level": "trajectory"}, LOG_RATIOS.sum(2, keepdim=True)),
        ({"log_ratio": "mean"}, LOG_RATIOS / ELEMENTS),
        ({"level": "sequence", "log_ratio": "mean"}, (LOG_RATIOS / ELEMENTS).sum(2, keepdim=True)),
    ],
)
def test_a_level_says_of_which_log_ratio_a_steps_weight_is_made_once_for_all_steps_of_the_optimizer(level, expected):
    settings = {"mode": "decoupled", "weights": "importance", "normalise": True, "cap": None, **level}
    [rank], _ = weigh(**{"algorithm.correction": settings, "algorithm.kl_coef": 0.1, "trainer.steps_per_update": 2})
    assert rank.log == ["proximal", "proximal", "accumulate", "step", "accumulate", "step"]
    weights = (expected.exp() / expected.exp().mean()).expand(2, 4, 2)
    torch.testing.assert_close(weights_of(rank), weights, rtol=1e-12, atol=0)


def test_log_ratios_of_buckets_of_several_sizes_are_each_divided_by_their_own():
    settings = {"mode": "decoupled", "weights": "importance", "log_ratio": "mean", "normalise": True, "cap": None}
    config = make_config(
        **{"algorithm.advantage": {"std": "none"}, "algorithm.correction": settings, "algorithm.kl_coef": 0.1}
    )
    elements = torch.tensor([ELEMENTS, 3 * ELEMENTS])[:, None, None]
    sizes = {
        name: msgspec.structs.replace(drift, num_elements=int(elements[int(name.split()[1][0])]))
        for name, drift in drifts().items()
    }
    rank = AccountingRank(drifts=sizes)
    run_update(config, [rank], [make_group(i, values) for i, values in enumerate(REWARDS[:2])])
    weights = (LOG_RATIOS / elements).exp()
    torch.testing.assert_close(weights_of(rank), weights / weights.mean(), rtol=1e-12, atol=0)


def test_masked_rows_weigh_nothing_and_the_others_make_up_for_them():
    settings = {"mode": "decoupled", "kappa_nats": 0.6}
    [rank], metrics = weigh(kappa=True, **{"algorithm.correction": settings, "algorithm.kl_coef": 0.1})
    kept = (LOG_RATIOS.abs() <= 0.6).double()
    assert 0 < kept.sum() < 16
    torch.testing.assert_close(weights_of(rank), kept * (16 / kept.sum()), rtol=1e-12, atol=0)
    assert metrics["masked/kappa_nats"] == pytest.approx(1 - kept.mean().item())
    assert metrics["gamma"] == 1.0


def test_a_mask_that_looks_at_all_rows_takes_the_largest_of_the_whole_update():
    """Checks M2PO, which keeps the most rows whose mean squared log-ratio is below the bound."""
    bound = 1.0
    [rank], metrics = weigh(**{"algorithm.correction": {"mode": "decoupled", "m2": bound}})
    squares = sorted(x * x for group in DRIFTS for sample in group for x in sample)
    count = max(n for n in range(1, 17) if sum(squares[:n]) / n < bound)
    kept = (LOG_RATIOS.square() <= squares[count - 1]).double()
    assert kept.sum() == count < 16
    torch.testing.assert_close(weights_of(rank), kept * (16 / count), rtol=1e-12, atol=0)
    assert metrics["masked/m2"] == pytest.approx(1 - count / 16)


def test_an_update_with_every_row_masked_has_no_gradient():
    [rank], metrics = weigh(
        kappa=True, **{"algorithm.correction": {"mode": "decoupled", "kappa_nats": 1e-9}, "algorithm.kl_coef": 0.1}
    )
    assert torch.equal(weights_of(rank), torch.zeros(2, 4, 2, dtype=torch.float64))
    assert rank.theta == 0.0
    assert metrics["masked/kappa_nats"] == 1.0


@pytest.mark.parametrize("mode", ["decoupled", "none"])
async def test_several_steps_look_at_every_group_when_it_arrives(mode):
    """Checks that the pass runs before any step: afterwards the policy that the ratio is taken to is gone."""

    rank = AccountingRank(drifts=drifts())
    update = make_update(make_config(**{"algorithm.correction": {"mode": mode}, "trainer.steps_per_update": 2}), [rank])
    for number in range(2):
        await update.add(make_group(number, REWARDS[number]))
        assert rank.log == ["proximal"] * (number + 1)
    metrics = await update.finish()
    assert rank.log == ["proximal"] * 2 + ["accumulate", "step"] * 2
    assert all(batch.weights is None for batch in rank.batches), "each row's own correction is the rank's to make"
    assert metrics == {"loss": 1.5}
