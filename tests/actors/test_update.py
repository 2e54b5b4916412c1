"""One update: how far it may stream, and that streaming changes no gradient."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from actor_world import AccountingRank, Desk, make_config, make_group

from omni_async.actors.rank import Rank
from omni_async.actors.tracer import Tracer
from omni_async.actors.update import Update, streaming_mode
from omni_async.control.clock import ManualClock
from omni_async.store import LocalStore
from omni_async.training.engine import TrainEngine
from omni_async.types import ReadyGroup
from omni_async.weights.buckets import unpack
from tests.fakes import TinyPolicy, tiny_trajectory

REWARDS = [[0.1, 0.9, 0.4, 0.3], [2.0, 1.0, 1.5, 0.0], [0.2, 0.2, 0.3, 0.7], [1.0, 3.0, 2.0, 2.5]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run_update(config: Any, ranks: list[Any], groups: list[ReadyGroup]) -> dict[str, float]:
    async def main() -> dict[str, float]:
        update = Update(config, ranks, Tracer("trainer", Desk(), ManualClock()), version=0)
        for missing, group in zip(range(len(groups), 0, -1), groups, strict=True):
            assert update.places == missing
            await update.add(group)
        assert update.places == 0
        return await update.finish()

    return asyncio.run(main())


def account(rewards: list[list[float]] = REWARDS, **changes: Any) -> AccountingRank:
    rank = AccountingRank()
    config = make_config(**{"trainer.groups_per_update": len(rewards), **changes})
    run_update(config, [rank], [make_group(i, values) for i, values in enumerate(rewards)])
    return rank


class Trained:
    """A real rank after one update of TinyPolicy on these rewards: its weights, its metrics and which calls it took."""

    def __init__(self, rewards: list[list[float]] = REWARDS, **changes: Any) -> None:
        config = make_config(**{"trainer.groups_per_update": len(rewards), **changes})
        policy = TinyPolicy("0")
        rank = Rank(0, 1, lambda: TrainEngine(config, policy, 0, 1, torch.device("cpu")), LocalStore())
        groups = [
            make_group(number, values, [tiny_trajectory(policy, config, 10 * number + i, range(1, 3)) for i in range(len(values))])
            for number, values in enumerate(rewards)
        ]
        asyncio.run(rank.setup(None, None))
        self.before = self._weights(rank)
        self.metrics = run_update(config, [rank], groups)
        self.after = self._weights(rank)

    @staticmethod
    def _weights(rank: Rank) -> dict[str, torch.Tensor]:
        exported = asyncio.run(rank.export(0))
        assert exported is not None
        return {name: tensor.clone() for name, tensor in unpack(*exported)}

    def same_step_as(self, other: Trained) -> bool:
        """SGD with lr 1 and no momentum: the step is the gradient."""
        return all(torch.allclose(self.after[name], other.after[name], rtol=0, atol=1e-6) for name in self.after)

    @property
    def moved(self) -> float:
        return max((self.after[name] - self.before[name]).abs().max().item() for name in self.after)


# ---- how far it may stream --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "mode", "reason"),
    [
        ({}, "unscaled", "applied to the gradient at the end"),
        ({"trainer.streaming": "on"}, "unscaled", "applied to the gradient at the end"),
        ({"trainer.streaming": "off"}, "collect", "switched off"),
        ({"algorithm.advantage": {"std": "group"}}, "as_ready", "advantage.std: group needs the group alone"),
        ({"algorithm.advantage": {"std": "none"}}, "as_ready", "advantage.std: none needs the group alone"),
        ({"algorithm.advantage": {"std": "group"}, "algorithm.kl_coef": 0.1}, "as_ready", "needs the group alone"),
        ({"algorithm.advantage": {"std": "group"}, "trainer.streaming": "off"}, "collect", "switched off"),
        ({"algorithm.kl_coef": 0.1}, "collect", "(KL) need the whole update"),
        ({"trainer.steps_per_update": 2}, "collect", "applied whole"),
        ({"algorithm.advantage": {"std": "group"}, "trainer.steps_per_update": 2}, "collect", "applied whole"),
    ],
)
def test_the_configuration_decides_how_far_an_update_streams_and_says_why(changes, mode, reason):
    chosen, why = streaming_mode(make_config(**changes))
    assert chosen == mode
    assert reason in why


def test_streamed_groups_are_trained_when_they_come_and_collected_ones_when_all_are_there():
    async def before_the_last_group(**changes: Any) -> list[str]:
        rank = AccountingRank()
        update = Update(make_config(**changes), [rank], Tracer("trainer", Desk(), ManualClock()), version=0)
        await update.add(make_group(0, REWARDS[0]))
        return rank.log

    assert asyncio.run(before_the_last_group()) == ["accumulate"]
    assert asyncio.run(before_the_last_group(**{"algorithm.advantage": {"std": "group"}})) == ["accumulate"]
    assert asyncio.run(before_the_last_group(**{"trainer.streaming": "off"})) == []


# ---- it changes no gradient -------------------------------------------------------------------------------------------------------


def test_streaming_with_a_global_std_makes_the_same_step_as_collecting():
    streamed, collected = Trained(), Trained(**{"trainer.streaming": "off"})
    assert collected.moved > 1e-3
    assert streamed.same_step_as(collected)
    assert streamed.metrics.keys() == collected.metrics.keys()
    for name in ("loss", "advantage_abs", "grad_norm", "clip_fraction"):
        assert streamed.metrics[name] == pytest.approx(collected.metrics[name], abs=1e-6, rel=1e-5), name


def test_a_binding_advantage_clip_is_found_at_the_end_and_the_update_is_computed_again():
    clipped = {"algorithm.advantage": {"clip_max": 0.5}}
    rank = account(**clipped)
    assert rank.log == ["accumulate"] * 4 + ["discard"] + ["accumulate"] * 4 + ["step"]
    assert rank.scales == [1.0]
    assert max(abs(a) for group in rank.groups[4:] for a in group) == 0.5

    streamed, collected = Trained(**clipped), Trained(**clipped, **{"trainer.streaming": "off"})
    assert streamed.same_step_as(collected)
    assert streamed.metrics == pytest.approx(collected.metrics, abs=1e-6, rel=1e-5, nan_ok=True)
    assert not streamed.same_step_as(Trained())  # so the clip did matter


def test_a_group_std_makes_the_same_step_streamed_or_collected():
    group = {"algorithm.advantage": {"std": "group"}}
    assert Trained(**group).same_step_as(Trained(**group, **{"trainer.streaming": "off"}))


def test_several_steps_make_the_same_weights_streamed_or_collected():
    changes = {"algorithm.advantage": {"std": "group"}, "trainer.steps_per_update": 2}
    streamed, collected = Trained(**changes), Trained(**changes, **{"trainer.streaming": "off"})
    assert streamed.same_step_as(collected)
    assert streamed.metrics == pytest.approx(collected.metrics, abs=1e-6, rel=1e-5, nan_ok=True)


def test_an_update_of_equal_rewards_leaves_the_weights_alone():
    trained = Trained([[1.0] * 4] * 2)
    assert trained.moved == 0.0


# ---- steps and weights ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("std", ["global", "group", "none"])
@pytest.mark.parametrize("streaming", ["auto", "off"])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_every_optimizer_step_takes_the_mean_over_its_rows(std, streaming, steps):
    rank = account(**{"algorithm.advantage": {"std": std}, "trainer.streaming": streaming, "trainer.steps_per_update": steps})
    assert rank.step_weights == pytest.approx([1.0] * steps)


def test_an_update_is_cut_into_steps_of_whole_groups_and_its_metrics_are_their_means():
    rank = AccountingRank()
    config = make_config(**{"trainer.groups_per_update": 4, "trainer.steps_per_update": 2, "algorithm.advantage": {"std": "group"}})
    metrics = run_update(config, [rank], [make_group(i, values) for i, values in enumerate(REWARDS)])
    assert rank.log == ["accumulate", "accumulate", "step"] * 2
    assert metrics == {"loss": 1.5}


def test_the_global_std_is_applied_once_at_the_end():
    rank = account()
    rewards = torch.tensor(REWARDS, dtype=torch.float64).flatten()
    assert rank.scales == pytest.approx([1 / (rewards.std().item() + 1e-4)])
    assert [sum(group) for group in rank.groups] == pytest.approx([0.0] * 4)


def test_every_rank_takes_every_call():
    ranks = [AccountingRank(), AccountingRank()]
    config = make_config(**{"trainer.workers": 2})
    run_update(config, ranks, [make_group(i, values) for i, values in enumerate(REWARDS[:2])])
    assert ranks[0].log == ranks[1].log == ["accumulate", "accumulate", "step"]
