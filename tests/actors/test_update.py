"""Tests one update: streaming changes no gradient, and every rank is given what it needs."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from actor_world import (
    FINAL_LATENTS,
    GROUP_STD,
    PREFERENCES,
    REWARDS,
    STEPS,
    AccountingRank,
    account,
    make_config,
    make_group,
    make_update,
    run_update,
)

from omni_async.actors.api import Abandoned
from omni_async.actors.plan import plan_updates
from omni_async.actors.rank import Rank
from omni_async.algorithms.advantages import RewardHistory
from omni_async.layout import ParallelLayout
from omni_async.store import LocalStore, ObjectLost
from omni_async.training.engine import TrainEngine
from omni_async.types import SampleDrift
from omni_async.weights.buckets import unpack
from tests.fakes import TinyPolicy, load_model, tiny_trajectory


class Drifts(dict[str, SampleDrift]):
    """None of any sample."""

    def __missing__(self, trajectory: str) -> SampleDrift:
        return SampleDrift((0.0, 0.0), None, 24)


class Trained:
    """A real rank after one update of TinyPolicy on these rewards: its weights and its metrics. `stale`: the samples
    are of other weights. `first_look_at_all`: corrections are made from the whole update, needed or not."""

    def __init__(
        self, rewards: list[list[float]] = REWARDS, stale: bool = False, first_look_at_all: bool = False, **changes: Any
    ) -> None:
        config = make_config(**{"trainer.groups_per_update": len(rewards), **changes})
        policy, plan = TinyPolicy("0"), plan_updates(config)
        if first_look_at_all:
            plan = replace(plan, mode="collect", proximal=True, weigh=True)
        behaviour = load_model(policy)
        if stale:
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for p in behaviour.parameters():
                    p.add_(0.02 * torch.randn(p.shape, generator=generator))
        alone = ParallelLayout()
        rank = Rank(alone, lambda: TrainEngine(config, policy, alone, torch.device("cpu")), LocalStore(), plan.paired)

        def drawn(number: int, count: int) -> list[Any]:
            return [tiny_trajectory(policy, config, 10 * number + i, range(1, 3), behaviour) for i in range(count)]

        groups = [make_group(number, values, drawn(number, len(values))) for number, values in enumerate(rewards)]
        asyncio.run(rank.setup(None, None))
        before = self._weights(rank)
        self.metrics = run_update(config, [rank], groups, plan=plan)
        self.after = self._weights(rank)
        self.moved = (self.after - before).abs().max().item()

    @staticmethod
    def _weights(rank: Rank) -> torch.Tensor:
        exported = asyncio.run(rank.export(0))
        weights = torch.cat([tensor.flatten() for _, tensor in unpack(exported.manifest(), exported.buckets)])
        exported.release()
        return weights

    def same_step_as(self, other: Trained) -> bool:
        """Compares weights: with SGD, lr 1 and no momentum, the step is the gradient."""
        return torch.allclose(self.after, other.after, rtol=0, atol=1e-6)


# ---- groups that cannot be read --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, GROUP_STD, {"trainer.streaming": "off"}, {"algorithm.correction": {"mode": "decoupled"}}]
)
def test_a_group_that_one_rank_cannot_read_leaves_the_update_as_it_was(changes):
    ranks = [AccountingRank(rank=r, world=2, drifts=Drifts()) for r in range(2)]
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


# ---- streaming changes no gradient -----------------------------------------------------------------------------------


DPO = {**FINAL_LATENTS, "algorithm.name": "diffusion_dpo", "algorithm.dpo": {"beta": 20.0}}


@pytest.mark.parametrize(
    "changes",
    [{}, GROUP_STD, {**GROUP_STD, "trainer.steps_per_update": 2}, DPO],
    ids=["a global std", "a group std", "several steps", "preferences"],
)
def test_streaming_makes_the_same_step_as_collecting(changes):
    streamed, collected = Trained(**changes), Trained(**changes, **{"trainer.streaming": "off"})
    assert collected.moved > 1e-4
    assert streamed.same_step_as(collected)
    assert streamed.metrics == pytest.approx(collected.metrics, abs=1e-6, rel=1e-5, nan_ok=True)


STD = torch.tensor(REWARDS, dtype=torch.float64).std().item()


@pytest.mark.parametrize(
    ("form", "eps", "divisor"),
    [("added", 1e-4, STD + 1e-4), ("floor", 1e-4, STD), ("floor", 2.0, 2.0)],
    ids=["added", "below", "binds"],
)
def test_the_global_std_is_applied_once_at_the_end_and_a_floor_under_it_is_streamed_too(form, eps, divisor):
    changes = {"algorithm.advantage": {"eps_form": form, "eps": eps}}
    rank = account(**changes)
    assert rank.scales == pytest.approx([1 / divisor])
    assert [sum(group) for group in rank.groups] == pytest.approx([0.0] * 4)
    assert Trained(**changes).same_step_as(Trained(**changes, **{"trainer.streaming": "off"}))


def test_a_binding_advantage_clip_is_found_at_the_end_and_the_update_is_computed_again_on_every_rank():
    clipped = {"algorithm.advantage": {"clip_max": 0.5}}
    ranks = [AccountingRank(rank=r, world=2) for r in range(2)]
    config = make_config(**{"trainer.groups_per_update": 4, "trainer.workers": 2, **clipped})
    run_update(config, ranks, [make_group(i, values) for i, values in enumerate(REWARDS)])
    for rank in ranks:
        assert rank.log == ["accumulate"] * 4 + ["discard"] + ["accumulate"] * 4 + ["step"]
        assert rank.scales == [1.0]
        assert rank.step_weights == pytest.approx([0.5]), "what was discarded does not count"
        assert max(abs(a) for group in rank.groups[4:] for a in group) == 0.5

    streamed, collected = Trained(**clipped), Trained(**clipped, **{"trainer.streaming": "off"})
    assert streamed.same_step_as(collected)
    assert streamed.metrics == pytest.approx(collected.metrics, abs=1e-6, rel=1e-5, nan_ok=True)
    assert not streamed.same_step_as(Trained())  # so the clip did matter


@pytest.mark.parametrize(
    "settings",
    [
        {"weights": "importance", "normalise": True, "cap": None},
        {"weights": "importance", "level": "trajectory"},
        {"kappa_nats": 0.05},
        {"weights": "importance", "k2": 0.05, "denominator": "all"},
        {"weights": "importance", "normalise": True, "cap": None, "k2": 0.05, "denominator": "all"},
    ],
)
def test_corrections_make_the_same_step_row_by_row_or_from_the_whole_update(settings):
    """Checks that a correction that needs no more than its row may as well look at all of them first."""
    changes = {**GROUP_STD, "algorithm.correction": {"mode": "decoupled", **settings}}
    streamed, collected = Trained(stale=True, **changes), Trained(stale=True, first_look_at_all=True, **changes)
    assert collected.moved > 1e-3
    assert streamed.same_step_as(collected)
    uncorrected = {"algorithm.correction": {"mode": "decoupled"}}
    assert not streamed.same_step_as(Trained(stale=True, **GROUP_STD, **uncorrected))
    for name in (f"masked/{rule}" for rule in ("kappa_nats", "k2") if rule in settings):
        assert streamed.metrics[name] == pytest.approx(collected.metrics[name])
        assert 0 < collected.metrics[name] < 1


def test_a_real_rank_takes_the_ratio_to_the_policy_of_the_updates_start():
    """Uses fresh samples: the behaviour policy is that policy too, so that bypass and decoupled are the same; a rank
    that took its second step's ratio to its own weights would have every ratio 1 there."""
    two_steps = {**GROUP_STD, "trainer.steps_per_update": 2}
    decoupled = Trained(**two_steps, **{"algorithm.correction": {"mode": "decoupled"}})
    bypass = Trained(**two_steps)
    assert decoupled.same_step_as(bypass)
    assert decoupled.metrics["ratio_deviation"] == pytest.approx(bypass.metrics["ratio_deviation"], rel=1e-4)
    assert decoupled.metrics["ratio_deviation"] > 1e-4


def test_an_update_of_equal_rewards_leaves_the_weights_alone():
    assert Trained([[1.0] * 4] * 2).moved == 0.0


# ---- steps and weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("std", ["global", "group", "none"])
@pytest.mark.parametrize("streaming", ["auto", "off"])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_every_optimizer_step_takes_the_mean_over_its_rows(std, streaming, steps):
    changes = {"trainer.streaming": streaming, "trainer.steps_per_update": steps}
    rank = account(**{"algorithm.advantage": {"std": std}, **changes})
    assert rank.step_weights == pytest.approx([1.0] * steps)


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({"rollout.sde": {"window": {"size": 4, "range": [0, STEPS - 1]}}, "algorithm.timestep_fraction": 0.5}, 2),
        ({**FINAL_LATENTS, "algorithm.name": "diffusion_nft"}, STEPS),
        ({**FINAL_LATENTS, "algorithm.name": "diffusion_nft", "algorithm.forward": {"draws": 3}}, 3),
        ({**FINAL_LATENTS, "algorithm.name": "diffusion_dpo", "algorithm.forward": {"draws": 3}}, 3),
    ],
)
def test_rows_that_are_not_trained_take_no_part_in_the_mean(changes, rows):
    rank = AccountingRank(rows=rows)
    run_update(make_config(**changes), [rank], [make_group(i, values) for i, values in enumerate(REWARDS[:2])])
    assert rank.step_weights == pytest.approx([1.0])


def test_an_update_is_cut_into_steps_of_whole_groups_and_its_metrics_are_their_means_or_maxima():
    """Checks a metric that some steps do not have, too: it is averaged over those that have it."""
    found = {"ess/step_01": 0.5, "both": 1.0, "weight/max": 2.0}, {"ess/step_03": 0.25, "both": 2.0, "weight/max": 1.0}
    rank = AccountingRank(metrics=found)
    config = make_config(**{"trainer.groups_per_update": 4, "trainer.steps_per_update": 2, **GROUP_STD})
    metrics = run_update(config, [rank], [make_group(i, values) for i, values in enumerate(REWARDS)])
    assert rank.log == ["accumulate", "accumulate", "step"] * 2
    assert metrics == {"loss": 1.5, "both": 1.5, "ess/step_01": 0.5, "ess/step_03": 0.25, "weight/max": 2.0}


# ---- what a rank is given --------------------------------------------------------------------------------------------


def test_a_batch_carries_the_versions_of_each_samples_steps():
    rank = AccountingRank()
    groups = [make_group(3, REWARDS[0], versions=(4, 6)), make_group(5, REWARDS[1], versions=(7, 7))]
    run_update(make_config(), [rank], groups, version=7)
    assert [batch.group for batch in rank.batches] == [3, 5]
    versions = [(batch.version, [tuple(of_sample) for of_sample in batch.step_versions]) for batch in rank.batches]
    assert versions == [(7, [(4, 6)] * 4), (7, [(7, 7)] * 4)]
    assert rank.fetched[3] == tuple(f"trajectory 3.{i}" for i in range(4))
    assert all(batch.weights is None for batch in rank.batches)


def test_every_sample_has_training_noise_of_its_own_and_the_run_decides_which():
    def seeds(**changes: Any) -> list[tuple[int, ...]]:
        return [batch.seeds for batch in account(**changes).batches]

    drawn = [seed for group in seeds() for seed in group]
    assert len(set(drawn)) == 16
    assert all(0 <= seed < 2**63 for seed in drawn)
    assert seeds() == seeds(**{"trainer.streaming": "off"}), "however it streams"
    assert set(drawn).isdisjoint(seed for group in seeds(**{"run.seed": 1}) for seed in group)


# ---- preferences -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", ["auto", "off"])
def test_a_preference_is_the_best_and_the_worst_sample_of_a_group_and_they_share_their_noise(streaming):
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


def test_a_pair_of_a_dataset_is_trained_chosen_first_and_has_no_age():
    rank = AccountingRank(rows=STEPS)
    config = make_config(**PREFERENCES, **{"trainer.groups_per_update": 1})
    run_update(config, [rank], [make_group(0, [1.0, 0.0], versions=())], version=4)
    [batch] = rank.batches
    assert rank.fetched == {0: ("trajectory 0.0", "trajectory 0.1")}
    assert [tuple(versions) for versions in batch.step_versions] == [(), ()]


# ---- a machine that will be taken away -------------------------------------------------------------------------------


class PreemptingRank(AccountingRank):
    """A rank that requests preemption when it has accumulated `after` groups."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after, self.accumulated, self.preempted = after, 0, False

    async def accumulate(self, batch: Any, row_weight: float) -> None:
        await super().accumulate(batch, row_weight)
        self.accumulated += 1
        self.preempted |= self.accumulated == self.after


@pytest.mark.parametrize(("after", "steps", "accumulated"), [(1, 1, 1), (3, 1, 3), (3, 2, 4)])
def test_an_update_is_given_up_between_two_groups_unless_it_has_begun_to_step(after, steps, accumulated):
    rank = PreemptingRank(after)
    settings = {"trainer.groups_per_update": 4, "trainer.steps_per_update": steps, "trainer.streaming": "off"}
    groups = [make_group(i, values) for i, values in enumerate(REWARDS)]
    with pytest.raises(Abandoned) if steps == 1 else contextlib.nullcontext():
        run_update(make_config(**settings), [rank], groups, preempt=lambda: rank.preempted)
    assert rank.accumulated == accumulated
