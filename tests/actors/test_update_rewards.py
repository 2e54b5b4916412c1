"""Tests advantages that look at more than a group: several scorers, and all the rewards a prompt ever had."""

from __future__ import annotations

import pytest
import torch
from actor_world import REWARDS, AccountingRank, make_config, make_group, make_update, run_update

from omni_async.algorithms.history import RewardHistory

# ---- rewards of several scorers --------------------------------------------------------------------------------------

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


# ---- a prompt's rewards over the run ---------------------------------------------------------------------------------

TRACKED = {
    "algorithm.advantage": {"track_prompts": True, "std": "none", "clip_max": 100.0},
    "trainer.groups_per_update": 2,
}


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
    run_update(
        config,
        [rank],
        [make_group(2, REWARDS[2], prompt=7), make_group(3, REWARDS[3], prompt=8)],
        history=history,
        version=1,
    )
    seven, eight = [*REWARDS[0], *REWARDS[1], *REWARDS[2]], REWARDS[3]
    assert rank.groups[0] == pytest.approx([r - sum(seven) / 12 for r in REWARDS[2]])
    assert rank.groups[1] == pytest.approx([r - sum(eight) / 4 for r in eight])
    assert (history.count(7), history.count(8)) == (12, 4)


def test_every_scorer_has_a_history_of_its_own_where_each_has_advantages_of_its_own():
    history = RewardHistory()
    config = make_config(
        **SCORERS, **{"algorithm.advantage": {"track_prompts": True, "aggregate": "advantages", "std": "none"}}
    )
    run_update(
        config,
        [AccountingRank()],
        [make_group(g, [0.0] * 4, values=values) for g, values in enumerate(VALUES)],
        history=history,
    )
    for prompt, values in enumerate(VALUES):
        count, first, second, *_ = history.state()[str(prompt)]
        assert (count, first, second) == pytest.approx(
            (4, sum(a for a, _ in values) / 4, sum(b for _, b in values) / 4)
        )


def test_groups_of_one_prompt_have_means_of_their_own_where_prompts_are_not_tracked():
    rank = AccountingRank()
    untracked = {"algorithm.advantage": {"std": "none"}, "trainer.groups_per_update": 2}
    run_update(make_config(**untracked), [rank], [make_group(i, REWARDS[i], prompt=7) for i in range(2)])
    for advantages, rewards in zip(rank.groups, REWARDS, strict=False):
        assert advantages == pytest.approx([r - sum(rewards) / 4 for r in rewards])
