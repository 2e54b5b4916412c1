"""Tests what looks at more than a group: weights computed from all groups on all ranks, which go to the ranks of their
samples, and advantages of several scorers and of all the rewards a prompt ever had. Which weights and advantages these
are is tested in tests/algorithms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from omni_async.algorithms.advantages import RewardHistory
from omni_async.types import SampleDrift
from tests.roles.actor_world import REWARDS, AccountingRank, make_config, make_group, make_update, run_update

# Log-ratios in nats of group g, sample i, trained step k: no two are alike, so that no two can be confused.
DRIFTS = [[[1.8 - g + 0.62 * i, 0.34 * g - 0.8 - 0.46 * i * (i + 1)] for i in range(4)] for g in range(2)]
LOG_RATIOS = torch.tensor(DRIFTS, dtype=torch.float64)  # (groups, samples, steps)
ELEMENTS = 24
IMPORTANCE = {"weights": "importance", "normalise": True, "cap": None}
KL = {"algorithm.kl_coef": 0.1}


def decoupled(**settings: Any) -> dict[str, Any]:
    return {"algorithm.correction": {"mode": "decoupled", **settings}}


def make_drifts(kappa: bool = False) -> dict[str, SampleDrift]:
    return {
        f"trajectory {g}.{i}": SampleDrift(tuple(row), tuple(abs(x) for x in row) if kappa else None, ELEMENTS)
        for g, group in enumerate(DRIFTS)
        for i, row in enumerate(group)
    }


def weigh(
    world: int = 1, kappa: bool = False, drifts: dict[str, SampleDrift] | None = None, **changes: Any
) -> tuple[list[AccountingRank], dict[str, float]]:
    ranks = [AccountingRank(rank=r, world=world, drifts=drifts or make_drifts(kappa)) for r in range(world)]
    config = make_config(**{"trainer.workers": world, "algorithm.advantage": {"std": "none"}, **changes})
    metrics = run_update(config, ranks, [make_group(i, values) for i, values in enumerate(REWARDS[:2])])
    return ranks, metrics


def weights_of(rank: AccountingRank) -> torch.Tensor:
    """Returns the weights (groups, samples, steps)."""
    return torch.tensor([batch.weights for batch in rank.batches], dtype=torch.float64)


def test_weights_and_advantages_are_given_together_and_the_looks_before_have_neither():
    [rank], metrics = weigh(**decoupled(weights="tempered", cap=None))
    tempered = (metrics["gamma"] * LOG_RATIOS).exp()
    assert 0 < metrics["gamma"] < 1
    torch.testing.assert_close(weights_of(rank), tempered / tempered.mean(), rtol=1e-9, atol=0)
    assert [batch.advantages for batch in rank.recomputed] == [(0.0,) * 4] * 2
    assert all(batch.weights is None for batch in rank.recomputed)
    for looked, trained in zip(rank.recomputed, rank.batches, strict=True):
        assert replace(looked, advantages=trained.advantages, weights=trained.weights) == trained


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
    [rank], _ = weigh(**decoupled(**IMPORTANCE, **level), **KL, **{"trainer.steps_per_update": 2})
    assert rank.log == ["proximal", "proximal", "accumulate", "step", "accumulate", "step"]
    weights = (expected.exp() / expected.exp().mean()).expand(2, 4, 2)
    torch.testing.assert_close(weights_of(rank), weights, rtol=1e-12, atol=0)


def test_log_ratios_of_buckets_of_several_sizes_are_each_divided_by_their_own():
    elements = torch.tensor([ELEMENTS, 3 * ELEMENTS])[:, None, None]
    sizes = {
        name: replace(drift, num_elements=int(elements[int(name.split()[1][0])]))
        for name, drift in make_drifts().items()
    }
    [rank], _ = weigh(drifts=sizes, **decoupled(**IMPORTANCE, log_ratio="mean"), **KL)
    weights = (LOG_RATIOS / elements).exp()
    torch.testing.assert_close(weights_of(rank), weights / weights.mean(), rtol=1e-12, atol=0)


def test_masked_rows_weigh_nothing_and_the_others_make_up_for_them_and_without_any_there_is_no_gradient():
    [rank], metrics = weigh(kappa=True, **decoupled(kappa_nats=0.6), **KL)
    kept = (LOG_RATIOS.abs() <= 0.6).double()
    assert 0 < kept.sum() < 16
    torch.testing.assert_close(weights_of(rank), kept * (16 / kept.sum()), rtol=1e-12, atol=0)
    assert (metrics["masked/kappa_nats"], metrics["gamma"]) == (pytest.approx(1 - kept.mean().item()), 1.0)
    [rank], metrics = weigh(kappa=True, **decoupled(kappa_nats=1e-9), **KL)
    assert torch.equal(weights_of(rank), torch.zeros(2, 4, 2, dtype=torch.float64))
    assert (rank.theta, metrics["masked/kappa_nats"]) == (0.0, 1.0)


@pytest.mark.parametrize("mode", ["decoupled", "none"])
async def test_several_steps_look_at_every_group_when_it_arrives(mode):
    """Checks that the pass runs before any step: afterwards the policy that the ratio is taken to is gone."""
    rank = AccountingRank(drifts=make_drifts())
    update = make_update(make_config(**decoupled(mode=mode), **{"trainer.steps_per_update": 2}), [rank])
    for number in range(2):
        await update.add(make_group(number, REWARDS[number]))
        assert rank.log == ["proximal"] * (number + 1)
    metrics = await update.finish()
    assert rank.log == ["proximal"] * 2 + ["accumulate", "step"] * 2
    assert all(batch.weights is None for batch in rank.batches), "each row's own correction is the rank's to make"
    assert metrics == {"loss": 1.5}


@given(st.integers(1, 7), st.integers(1, 2), st.integers(1, 2), st.integers(1, 3), st.integers(2, 6))
def test_weights_find_their_samples_and_every_sample_is_trained_once(data, sequence, steps, per_step, size) -> None:
    """Weights are exp(L) over its mean, which identifies the sample that a log-ratio L was found on."""
    groups, world = steps * per_step, data * sequence
    log_ratios = torch.arange(groups * size * 2, dtype=torch.float64).reshape(groups, size, 2) / (groups * size * 4)
    rewards = torch.rand(groups, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    drifts = {
        f"trajectory {g}.{i}": SampleDrift(tuple(log_ratios[g, i].tolist()), None, 24)
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


def several(aggregate: str, std: str) -> tuple[torch.Tensor, AccountingRank]:
    """Returns the advantages (groups, samples) that a rank was given."""
    rank = AccountingRank()
    config = make_config(**SCORERS, **{"algorithm.advantage": {"aggregate": aggregate, "std": std, "clip_max": 100.0}})
    groups = [make_group(g, [2 * a - b / 2 for a, b in values], values=values) for g, values in enumerate(VALUES)]
    run_update(config, [rank], groups)
    return torch.tensor(rank.groups, dtype=torch.float64), rank


def table() -> torch.Tensor:
    """Returns the scorers' values (groups, samples, scorers)."""
    return torch.tensor(VALUES, dtype=torch.float64)


@pytest.mark.parametrize(("aggregate", "std"), [("advantages", "group"), ("advantages", "global"), ("gdpo", "global")])
def test_advantages_of_each_scorer_are_summed_by_weight_and_gdpo_whitens_that_over_the_update(aggregate, std):
    found, rank = several(aggregate, std)
    over_the_update = aggregate == "advantages" and std == "global"
    deviation = table().reshape(8, 2).std(0) if over_the_update else table().std(1, keepdim=True)
    each = (table() - table().mean(1, keepdim=True)) / (deviation + 1e-4)
    summed = 2 * each[..., 0] - 0.5 * each[..., 1]
    expected = summed / (summed.std() + 1e-4) if aggregate == "gdpo" else summed
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert rank.log.index("step") == 2


TRACKED = {"algorithm.advantage": {"track_prompts": True, "std": "none", "clip_max": 100.0}}


async def test_the_history_learns_of_an_update_when_it_is_finished_and_nothing_of_an_abandoned_one():
    history = RewardHistory()
    abandoned = make_update(make_config(**TRACKED), [AccountingRank()], history=history)
    await abandoned.add(make_group(0, [9.0, 1.0, 5.0, 5.0], prompt=7))
    update = make_update(make_config(**TRACKED), [AccountingRank()], history=history)
    for number in range(2):
        await update.add(make_group(number, REWARDS[number], prompt=7))
        assert history.count(7) == 0
    await update.finish()
    assert history.count(7) == 8


def test_advantages_are_against_all_that_a_prompt_ever_had():
    """Uses two groups of prompt 7 in the first update, one of them and one of prompt 8 in the second."""
    history, config = RewardHistory(), make_config(**TRACKED)
    run_update(config, [AccountingRank()], [make_group(i, REWARDS[i], prompt=7) for i in range(2)], history=history)
    rank = AccountingRank()
    groups = [make_group(2, REWARDS[2], prompt=7), make_group(3, REWARDS[3], prompt=8)]
    run_update(config, [rank], groups, history=history, version=1)
    seven, eight = [*REWARDS[0], *REWARDS[1], *REWARDS[2]], REWARDS[3]
    assert rank.groups[0] == pytest.approx([r - sum(seven) / 12 for r in REWARDS[2]])
    assert rank.groups[1] == pytest.approx([r - sum(eight) / 4 for r in eight])
    assert (history.count(7), history.count(8)) == (12, 4)
    alone = AccountingRank()  # where prompts are not tracked, groups of one prompt have means of their own
    groups = [make_group(i, REWARDS[i], prompt=7) for i in range(2)]
    run_update(make_config(**{"algorithm.advantage": {"std": "none"}}), [alone], groups)
    for advantages, rewards in zip(alone.groups, REWARDS, strict=False):
        assert advantages == pytest.approx([r - sum(rewards) / 4 for r in rewards])


def test_every_scorer_has_a_history_of_its_own_where_each_has_advantages_of_its_own():
    history = RewardHistory()
    advantage = {"track_prompts": True, "aggregate": "advantages", "std": "none"}
    config = make_config(**SCORERS, **{"algorithm.advantage": advantage})
    groups = [make_group(g, [0.0] * 4, values=values) for g, values in enumerate(VALUES)]
    run_update(config, [AccountingRank()], groups, history=history)
    for prompt, values in enumerate(VALUES):
        means = [sum(column) / 4 for column in zip(*values, strict=True)]
        assert history.state()[str(prompt)][:3] == pytest.approx([4, *means])
