"""Tests one update: streaming changes no gradient, and every rank gets what it needs. tests/training has real ranks."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
import torch

from omni_async.algorithms.advantages import RewardHistory
from omni_async.roles.api import Abandoned
from omni_async.store import ObjectLost
from omni_async.types import SampleDrift
from tests.roles.actor_world import (
    FINAL_LATENTS,
    GROUP_STD,
    REWARDS,
    STEPS,
    AccountingRank,
    account,
    make_config,
    make_group,
    make_update,
    run_update,
)


@pytest.mark.parametrize("changes", [{}, {"algorithm.correction": {"mode": "decoupled"}}])
def test_an_unreadable_group_changes_nothing(changes):
    samples = [f"{again} {group}.{i}" for again in ("again", "trajectory") for group in range(2) for i in range(4)]
    drifts = dict.fromkeys(samples, SampleDrift((0.0, 0.0), None, 24, (0, 1)))
    ranks = [AccountingRank(rank=r, world=2, drifts=drifts) for r in range(2)]
    ranks[1].lost = {"trajectory 0.3"}

    async def main() -> dict[str, float]:
        update = make_update(make_config(**{"trainer.workers": 2, **changes}), ranks)
        with pytest.raises(ObjectLost, match=r"trajectory 0\.3 is gone"):
            await update.add(make_group(0, REWARDS[0]))
        assert (update.groups, update.missing) == ([], 2)
        assert ranks[0].log == ranks[1].log == []
        for number, again in ((1, "trajectory"), (0, "again")):
            await update.add(make_group(number, REWARDS[number], [f"{again} {number}.{i}" for i in range(4)]))
        return await update.finish()

    asyncio.run(main())
    assert [batch.group for batch in ranks[0].batches] == [1, 0]
    assert ranks[0].fetched[0] == tuple(f"again 0.{i}" for i in range(4))
    assert [rank.step_weights for rank in ranks] == [pytest.approx([0.5])] * 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"form": "best_of_n"}, [[0, 0, 0, 4.0], [4.0, 0, 0, 0]]),
        ({"form": "reward_weighted", "std": "none", "temperature": 2.0}, None),
        ({"form": "reward_weighted"}, None),
    ],
)
def test_forms_of_the_advantage_stream_and_collect_alike(changes, expected):
    rewards = [[1.0, 2.0, 3.0, 5.0], [0.5, 0.25, 0.0, -3.0]]
    changes = {"algorithm.advantage": changes}
    streamed, collected = account(rewards, **changes), account(rewards, **changes, **{"trainer.streaming": "off"})
    if expected is None:
        scale = 2.0 if "std" in changes["algorithm.advantage"] else torch.tensor(rewards).double().std().item() + 1e-4
        expected = (4 * (torch.tensor(rewards).double() / scale).softmax(1)).tolist()
    for rank in (streamed, collected):
        assert rank.groups == [pytest.approx(group) for group in expected]
    assert streamed.theta == pytest.approx(collected.theta)


DPO = {**FINAL_LATENTS, "algorithm.name": "diffusion_dpo", "algorithm.dpo": {"beta": 20.0}}
STD = torch.tensor(REWARDS, dtype=torch.float64).std().item()


@pytest.mark.parametrize(
    ("changes", "divisor"),
    [
        ({}, STD + 1e-4),
        ({"algorithm.advantage": {"eps_form": "floor", "eps": 2.0}}, 2.0),
        (GROUP_STD, 1.0),
        (DPO, 1.0),
    ],
    ids=["a global std", "a floor under it", "a group std", "preferences"],
)
def test_streaming_makes_the_same_step_as_collecting(changes, divisor):
    streamed, collected = account(**changes), account(**changes, **{"trainer.streaming": "off"})
    assert streamed.scales == pytest.approx([1 / divisor])
    assert [sum(group) for group in streamed.groups] == pytest.approx([0.0] * 4)
    assert abs(collected.theta) > 1e-3
    assert streamed.theta == pytest.approx(collected.theta)
    assert account([[1.0] * 4] * 2).theta == 0.0, "equal rewards leave the weights alone"


PART = {"rollout.sde": {"window": {"size": 4, "range": [0, STEPS - 1]}}, "algorithm.timestep_fraction": 0.5}


@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        (2, {}),
        (2, GROUP_STD),
        (2, PART),
        (STEPS, {**FINAL_LATENTS, "algorithm.name": "diffusion_nft"}),
        (3, {**DPO, "algorithm.forward": {"draws": 3}}),
    ],
)
@pytest.mark.parametrize("streaming", ["auto", "off"])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_every_step_takes_the_mean_over_its_rows(rows, changes, streaming, steps):
    rank = AccountingRank(rows=rows)
    account(rank=rank, **changes, **{"trainer.streaming": streaming, "trainer.steps_per_update": steps})
    assert rank.step_weights == pytest.approx([1.0] * steps)


def test_a_binding_clip_computes_the_update_again():
    clipped = {"algorithm.advantage": {"clip_max": 0.5}}
    ranks = [AccountingRank(rank=r, world=2) for r in range(2)]
    config = make_config(**{"trainer.groups_per_update": 4, "trainer.workers": 2, **clipped})
    run_update(config, ranks, [make_group(i, values) for i, values in enumerate(REWARDS)])
    for rank in ranks:
        assert rank.log == ["accumulate"] * 4 + ["discard"] + ["accumulate"] * 4 + ["step"]
        assert rank.scales == [1.0]
        assert rank.step_weights == pytest.approx([0.5]), "what was discarded does not count"
        assert max(abs(a) for group in rank.groups[4:] for a in group) == 0.5
    together = account(**clipped, **{"trainer.streaming": "off"}).theta
    assert sum(rank.theta for rank in ranks) == pytest.approx(together) != pytest.approx(account().theta)


def test_steps_of_whole_groups_and_their_metrics():
    found = (
        {"ess/step_01": 0.5, "both": 1.0, "weight/max": 2.0, "flops/sum": 3.0},
        {"ess/step_03": 0.25, "both": 2.0, "weight/max": 1.0, "flops/sum": 4.0},
    )
    rank = AccountingRank(metrics=found)
    config = make_config(**{"trainer.groups_per_update": 4, "trainer.steps_per_update": 2, **GROUP_STD})
    metrics = run_update(config, [rank], [make_group(i, values) for i, values in enumerate(REWARDS)])
    assert rank.log == ["accumulate", "accumulate", "step"] * 2
    means = {"loss": 1.5, "both": 1.5, "ess/step_01": 0.5, "ess/step_03": 0.25}
    assert metrics == {**means, "weight/max": 2.0, "flops/sum": 7.0}


def test_a_batch_carries_the_versions_of_each_samples_steps():
    rank = AccountingRank()
    groups = [make_group(3, REWARDS[0], versions=(4, 6)), make_group(5, REWARDS[1], versions=(7, 7))]
    run_update(make_config(), [rank], groups, version=7)
    assert [batch.group for batch in rank.batches] == [3, 5]
    versions = [(batch.version, [tuple(of_sample) for of_sample in batch.step_versions]) for batch in rank.batches]
    assert versions == [(7, [(4, 6)] * 4), (7, [(7, 7)] * 4)]
    assert rank.fetched[3] == tuple(f"trajectory 3.{i}" for i in range(4))
    assert all(batch.weights is None for batch in rank.batches)


def test_every_sample_has_its_own_training_noise():
    def seeds(**changes: Any) -> list[tuple[int, ...]]:
        return [batch.seeds for batch in account(**changes).batches]

    drawn = [seed for group in seeds() for seed in group]
    assert len(set(drawn)) == 16
    assert all(0 <= seed < 2**63 for seed in drawn)
    assert seeds() == seeds(**{"trainer.streaming": "off"}), "however it streams"
    assert set(drawn).isdisjoint(seed for group in seeds(**{"run.seed": 1}) for seed in group)


@pytest.mark.parametrize("streaming", ["auto", "off"])
def test_preferences_are_best_and_worst_and_share_noise(streaming):
    rank = AccountingRank(rows=STEPS)
    changes = {"algorithm.advantage": {"track_prompts": True, "aggregate": "gdpo"}, "trainer.streaming": streaming}
    config, history = make_config(**DPO, **changes), RewardHistory()
    groups = [make_group(0, [0.4, 0.1, 0.9, 0.3]), make_group(1, [2.0, 3.0, 1.0, 1.0])]
    run_update(config, [rank], groups, history=history)
    assert history.state() == {}, "preferences leave no trace in the history of rewards"
    first, second = rank.batches
    assert rank.fetched == {0: ("trajectory 0.2", "trajectory 0.1"), 1: ("trajectory 1.1", "trajectory 1.2")}
    assert rank.groups == [[1.0, -1.0]] * 2
    for batch in (first, second):
        assert len(batch.seeds) == 2 and batch.seeds[0] == batch.seeds[1]
    assert first.seeds != second.seeds
    assert rank.step_weights == pytest.approx([1.0])


@pytest.mark.parametrize(("after", "steps", "accumulated"), [(1, 1, 1), (3, 1, 3), (3, 2, 4)])
def test_preemption_between_groups(after, steps, accumulated):
    rank = AccountingRank()
    settings = {"trainer.groups_per_update": 4, "trainer.steps_per_update": steps, "trainer.streaming": "off"}
    groups = [make_group(i, values) for i, values in enumerate(REWARDS)]
    with pytest.raises(Abandoned) if steps == 1 else contextlib.nullcontext():
        run_update(make_config(**settings), [rank], groups, preempt=lambda: len(rank.batches) >= after)
    assert len(rank.batches) == accumulated
