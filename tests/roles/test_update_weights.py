"""Tests weights and advantages that need more than a group. tests/algorithms has their formulas."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from omni_async.algorithms.advantages import RewardHistory
from omni_async.types import SampleDrift
from tests.roles.actor_world import REWARDS, AccountingRank, make_config, make_group, make_update, run_update

# Log-ratios in nats of group g, sample i, trained step k, all different.
DRIFTS = [[[1.8 - g + 0.62 * i, 0.34 * g - 0.8 - 0.46 * i * (i + 1)] for i in range(4)] for g in range(2)]
LOG_RATIOS = torch.tensor(DRIFTS, dtype=torch.float64)  # (groups, samples, steps)
ELEMENTS = 24
IMPORTANCE = {"weights": "importance", "normalise": True, "cap": None}
KL = {"algorithm.kl_coef": 0.1}


def decoupled(**settings: Any) -> dict[str, Any]:
    return {"algorithm.correction": {"mode": "decoupled", **settings}}


def make_drifts(kappa: bool = False) -> dict[str, SampleDrift]:
    return {
        f"trajectory {g}.{i}": SampleDrift(tuple(row), tuple(abs(x) for x in row) if kappa else None, ELEMENTS, (0, 1))
        for g, group in enumerate(DRIFTS)
        for i, row in enumerate(group)
    }


def weigh(
    kappa: bool = False, drifts: dict[str, SampleDrift] | None = None, **changes: Any
) -> tuple[AccountingRank, dict[str, float]]:
    rank = AccountingRank(drifts=drifts or make_drifts(kappa))
    config = make_config(**{"algorithm.advantage": {"std": "none"}, **changes})
    metrics = run_update(config, [rank], [make_group(i, values) for i, values in enumerate(REWARDS[:2])])
    return rank, metrics


def weights_of(rank: AccountingRank) -> torch.Tensor:
    """Returns the weights (groups, samples, steps)."""
    return torch.tensor([batch.weights for batch in rank.batches], dtype=torch.float64)


def test_weights_and_advantages_come_together():
    rank, metrics = weigh(**decoupled(weights="tempered", cap=None))
    tempered = (metrics["gamma"] * LOG_RATIOS).exp()
    assert 0 < metrics["gamma"] < 1
    torch.testing.assert_close(weights_of(rank), tempered / tempered.mean(), rtol=1e-9, atol=0)
    assert {type(row) for batch in rank.batches for row in batch.weights} == {array}, "sent as bytes"
    for looked, trained in zip(rank.recomputed, rank.batches, strict=True):
        assert looked.weighed and looked == replace(trained, advantages=(0.0,) * 4, weights=None)


SIZES = torch.tensor([ELEMENTS, 3 * ELEMENTS])[:, None, None]  # of two buckets


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ({}, LOG_RATIOS),
        ({"level": "trajectory"}, LOG_RATIOS.sum(2, keepdim=True)),
        ({"log_ratio": "mean"}, LOG_RATIOS / SIZES),
        ({"level": "sequence", "log_ratio": "mean"}, (LOG_RATIOS / SIZES).sum(2, keepdim=True)),
    ],
)
def test_levels_of_weights(level, expected):
    sizes = [SampleDrift(tuple(row), None, int(SIZES[g]), (0, 1)) for g, group in enumerate(DRIFTS) for row in group]
    drifts = dict(zip(make_drifts(), sizes, strict=True))
    rank, _ = weigh(drifts=drifts, **decoupled(**IMPORTANCE, **level), **KL, **{"trainer.steps_per_update": 2})
    assert rank.log == ["proximal", "proximal", "accumulate", "step", "accumulate", "step"]
    weights = (expected.exp() / expected.exp().mean()).expand(2, 4, 2)
    torch.testing.assert_close(weights_of(rank), weights, rtol=1e-12, atol=0)


def test_masked_rows_weigh_nothing():
    rank, metrics = weigh(kappa=True, **decoupled(kappa_nats=0.6), **KL)
    kept = (LOG_RATIOS.abs() <= 0.6).double()
    assert 0 < kept.sum() < 16
    torch.testing.assert_close(weights_of(rank), kept * (16 / kept.sum()), rtol=1e-12, atol=0)
    assert (metrics["masked/kappa_nats"], metrics["gamma"]) == (pytest.approx(1 - kept.mean().item()), 1.0)
    rank, metrics = weigh(kappa=True, **decoupled(kappa_nats=1e-9), **KL)
    assert torch.equal(weights_of(rank), torch.zeros(2, 4, 2, dtype=torch.float64))
    assert (rank.theta, metrics["masked/kappa_nats"]) == (0.0, 1.0)


@pytest.mark.parametrize("mode", ["decoupled", "none"])
async def test_proximal_passes_come_before_any_step(mode):
    rank = AccountingRank(drifts=make_drifts())
    update = make_update(make_config(**decoupled(mode=mode), **{"trainer.steps_per_update": 2}), [rank])
    for number in range(2):
        await update.add(make_group(number, REWARDS[number]))
        assert rank.log == ["proximal"] * (number + 1)
    metrics = await update.finish()
    assert rank.log == ["proximal"] * 2 + ["accumulate", "step"] * 2
    assert all(batch.weights is None for batch in rank.batches), "each row's own correction is the rank's to make"
    assert not any(batch.weighed for batch in rank.recomputed), "nothing would read drifts"
    assert metrics == {"loss": 1.5}


@given(st.integers(1, 7), st.integers(1, 2), st.integers(1, 2), st.integers(1, 3), st.integers(2, 6))
def test_weights_find_their_samples(data, sequence, steps, per_step, size):
    """Weights are exp(L) over its mean, which identifies the sample of log-ratio L."""
    groups, world = steps * per_step, data * sequence
    log_ratios = torch.arange(groups * size * 2, dtype=torch.float64).reshape(groups, size, 2) / (groups * size * 4)
    rewards = torch.rand(groups, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    drifts = {
        f"trajectory {g}.{i}": SampleDrift(tuple(log_ratios[g, i].tolist()), None, 24, (0, 1))
        for g in range(groups)
        for i in range(size)
    }
    ranks = [AccountingRank(rank=r, world=world, sequence=sequence, drifts=drifts) for r in range(world)]
    trainer = {"workers": world, "sequence_parallel": sequence, "groups_per_update": groups, "steps_per_update": steps}
    settings = {f"trainer.{key}": value for key, value in trainer.items()} | decoupled(**IMPORTANCE) | KL
    config = make_config(**{"rollout.group_size": size, "algorithm.advantage": {"std": "none"}, **settings})
    run_update(config, ranks, [make_group(g, row) for g, row in enumerate(rewards.tolist())])

    weights = log_ratios.exp() / log_ratios.exp().mean()
    advantages = (rewards - rewards.mean(1, keepdim=True))[:, :, None]
    each = weights * advantages * torch.arange(1, size + 1)[:, None]
    trained = each.sum().item() / (groups // steps * size * 2)
    leaders = ranks[::sequence]
    assert sum(rank.theta for rank in leaders) == pytest.approx(trained, rel=1e-9, abs=1e-12)
    for rank in ranks:
        found = torch.tensor([batch.weights for batch in rank.batches], dtype=torch.float64)
        torch.testing.assert_close(found, weights, rtol=1e-9, atol=0)
    for g in range(groups):
        assert sorted(i for rank in leaders for i in rank.mine[g]) == list(range(size))
        assert all(rank.mine[g] == leaders[r // sequence].mine[g] for r, rank in enumerate(ranks))
    taken = [sum(map(len, rank.mine.values())) for rank in leaders]
    assert max(taken) - min(taken) <= 1


SCORERS = {"reward": {"scorers": [{"name": "ocr", "weight": 2.0}, {"name": "jpeg_size", "weight": -0.5}]}}
VALUES = [[(0.1, 10.0), (0.9, 30.0), (0.4, 20.0), (0.3, 25.0)], [(0.5, 40.0), (0.2, 45.0), (0.8, 5.0), (0.6, 15.0)]]


@pytest.mark.parametrize(("aggregate", "std"), [("advantages", "group"), ("advantages", "global"), ("gdpo", "global")])
def test_advantages_of_several_scorers(aggregate, std):
    rank, history, values = AccountingRank(), RewardHistory(), torch.tensor(VALUES, dtype=torch.float64)
    advantage = {"aggregate": aggregate, "std": std, "clip_max": 100.0}
    groups = [make_group(g, [2 * a - b / 2 for a, b in of_group], values=of_group) for g, of_group in enumerate(VALUES)]
    run_update(make_config(**SCORERS, **{"algorithm.advantage": advantage}), [rank], groups)
    over_the_update = aggregate == "advantages" and std == "global"
    deviation = values.reshape(8, 2).std(0) if over_the_update else values.std(1, keepdim=True)
    each = (values - values.mean(1, keepdim=True)) / (deviation + 1e-4)
    summed = 2 * each[..., 0] - 0.5 * each[..., 1]
    expected = summed / (summed.std() + 1e-4) if aggregate == "gdpo" else summed
    torch.testing.assert_close(torch.tensor(rank.groups, dtype=torch.float64), expected, rtol=1e-10, atol=1e-12)
    if aggregate == "advantages":
        tracked = make_config(**SCORERS, **{"algorithm.advantage": advantage | {"track_prompts": True}})
        run_update(tracked, [AccountingRank()], groups, history=history)
        for prompt, means in enumerate(values.mean(1).tolist()):
            assert history.state()[str(prompt)][:3] == pytest.approx([4, *means])


async def test_advantages_are_against_all_that_a_prompt_ever_had():
    """Uses two groups of prompt 7 in the first update, one of them and one of prompt 8 in the second."""
    config = make_config(**{"algorithm.advantage": {"track_prompts": True, "std": "none", "clip_max": 100.0}})
    rank, history = AccountingRank(), RewardHistory()
    abandoned = make_update(config, [AccountingRank()], history=history)
    await abandoned.add(make_group(0, [9.0, 1.0, 5.0, 5.0], prompt=7))
    for prompts, seen in (((7, 7), (8, 0)), ((7, 8), (12, 4))):
        update = make_update(config, [rank], history=history)
        before = history.count(7)
        for prompt in prompts:
            number = len(rank.batches) + len(update.groups)
            await update.add(make_group(number, REWARDS[number], prompt=prompt))
        assert history.count(7) == before
        await update.finish()
        assert (history.count(7), history.count(8)) == seen
    seven, eight = [*REWARDS[0], *REWARDS[1], *REWARDS[2]], REWARDS[3]
    assert rank.groups[2] == pytest.approx([r - sum(seven) / 12 for r in REWARDS[2]])
    assert rank.groups[3] == pytest.approx([r - sum(eight) / 4 for r in eight])
