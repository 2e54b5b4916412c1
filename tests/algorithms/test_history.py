import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_async.algorithms.history import RewardHistory
from omni_async.config.algorithm import Advantage

GLOBAL, GROUP, NONE = (Advantage(std=std, ddof=0) for std in ("global", "group", "none"))


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def close(got, expected, atol=1e-12):
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=torch.float64), atol=atol, rtol=1e-10)


def test_the_mean_is_over_all_rewards_of_the_prompt_by_hand():
    history = RewardHistory()
    history.commit(torch.tensor([3, 3]), f64([0.0, 2.0]))
    rewards, prompts = f64([4.0, 6.0, 1.0, 5.0]), torch.tensor([3, 3, 8, 8])
    # Prompt 3 has had 0, 2, 4, 6: mean 3, std sqrt(5). Prompt 8 has 1, 5: mean 3, std 2. This update alone: mean 4, std
    # sqrt(3.5).
    close(history.advantages(rewards, prompts, NONE), [1.0, 3.0, -2.0, 2.0])
    close(history.advantages(rewards, prompts, GLOBAL), f64([1.0, 3.0, -2.0, 2.0]) / (math.sqrt(3.5) + 1e-4))
    close(
        history.advantages(rewards, prompts, GROUP),
        [1 / (5**0.5 + 1e-4), 3 / (5**0.5 + 1e-4), -2 / (2 + 1e-4), 2 / (2 + 1e-4)],
    )
    floor = Advantage(std="group", ddof=1, eps=2.7, eps_form="floor")  # stds sqrt(20 / 3) = 2.58 and sqrt(8) = 2.83
    close(history.advantages(rewards, prompts, floor), [1 / 2.7, 3 / 2.7, -2 / 8**0.5, 2 / 8**0.5])


@given(
    updates=st.lists(
        st.lists(st.tuples(st.integers(0, 4), st.integers(-800, 800), st.integers(-80, 80)), min_size=1, max_size=8),
        min_size=1,
        max_size=5,
    ),
    std=st.sampled_from(["global", "group", "none"]),
    ddof=st.sampled_from([0, 1]),
    eps_form=st.sampled_from(["added", "floor"]),
)
@settings(max_examples=100, deadline=None)
def test_advantages_are_those_of_keeping_every_reward(updates, std, ddof, eps_form):
    """Keeps lists, as flow_grpo's tracker does, for two scorers."""
    options = Advantage(std=std, ddof=ddof, eps=0.01, eps_form=eps_form)
    history, kept = RewardHistory(), {}
    for update in updates:
        prompts, rewards = torch.tensor([row[0] for row in update]), f64([row[1:] for row in update]) / 16 + 100
        got = history.advantages(rewards, prompts, options)
        for prompt, row in zip(prompts.tolist(), rewards.tolist(), strict=True):
            kept.setdefault(prompt, []).append(row)
        for i, prompt in enumerate(prompts.tolist()):
            for k in range(2):
                over = rewards[:, k].tolist() if std == "global" else [row[k] for row in kept[prompt]]
                spread = np.std(over, ddof=ddof) if len(over) > 1 else 1.0
                divisor = {"added": spread + 0.01, "floor": max(spread, 0.01)}[eps_form] if std != "none" else 1.0
                expected = (rewards[i, k].item() - np.mean([row[k] for row in kept[prompt]])) / divisor
                assert got[i, k].item() == pytest.approx(expected, rel=1e-8, abs=1e-8)
        history.commit(prompts, rewards)
    assert {prompt: history.count(prompt) for prompt in range(5)} == {
        prompt: len(kept.get(prompt, [])) for prompt in range(5)
    }


@pytest.mark.parametrize("options", [GLOBAL, GROUP, NONE, Advantage(std="group", ddof=1, eps=0.0)])
def test_no_difference_from_the_past_is_exactly_zero(options):
    rewards, prompts = torch.full((3,), 0.1, dtype=torch.float64), torch.tensor([0, 0, 0])
    assert rewards.mean() != 0.1  # so rounding would show
    history = RewardHistory()
    for _ in range(3):
        assert history.advantages(rewards, prompts, options).tolist() == [0.0, 0.0, 0.0]
        history.commit(prompts, rewards)
    assert history.advantages(f64([4.0]), torch.tensor([1]), options).tolist() == [0.0]


def test_a_group_of_equal_rewards_has_signal_against_a_past():
    history = RewardHistory()
    history.commit(torch.tensor([0, 0]), f64([0.0, 0.0]))
    close(history.advantages(f64([1.0, 1.0]), torch.tensor([0, 0]), GROUP), f64([0.5, 0.5]) / (0.5 + 1e-4))


def test_a_refused_commit_changes_nothing():
    history = RewardHistory()
    history.commit(torch.tensor([2]), f64([1.0]))
    with pytest.raises(ValueError, match=r"finite, got \[nan\] at position 1"):
        history.commit(torch.tensor([2, 3]), f64([1.0, math.nan]))
    assert history.state() == {"2": [1, 1.0, 0.0]}


def test_small_spreads_around_large_means_survive_many_updates():
    """Uses values for which a sum of squares would have no correct digit left."""
    generator = torch.Generator().manual_seed(2)
    rewards = 1e8 + torch.rand(200, 4, dtype=torch.float64, generator=generator)
    history = RewardHistory()
    for update in rewards:
        history.commit(torch.zeros(4, dtype=torch.int64), update)
    [count, mean, m2] = history.state()["0"]
    assert count == 800 and mean == pytest.approx(rewards.mean().item(), rel=1e-14)
    assert m2 == pytest.approx(800 * rewards.var(correction=0).item(), rel=1e-5)


def test_a_state_through_json_continues_to_the_bit():
    generator = torch.Generator().manual_seed(3)
    history = RewardHistory()
    for _ in range(3):
        history.commit(torch.tensor([5, 5, 0, 11]), torch.rand(4, 2, dtype=torch.float64, generator=generator))
    restored = RewardHistory.from_state(json.loads(json.dumps(history.state())))
    assert list(history.state()) == ["0", "5", "11"] and restored.state() == history.state()
    rewards, prompts = torch.rand(4, 2, dtype=torch.float64, generator=generator), torch.tensor([5, 0, 1, 5])
    assert torch.equal(restored.advantages(rewards, prompts, GROUP), history.advantages(rewards, prompts, GROUP))
    restored.commit(prompts, rewards)
    history.commit(prompts, rewards)
    assert restored.state() == history.state()
    assert RewardHistory.from_state({}).state() == {}


@pytest.mark.parametrize(
    "numbers",
    [
        [],
        [1.0],
        [1.0, 2.0],
        [0.0, 2.0, 0.0],
        [1.5, 2.0, 0.0],
        [2.0, 2.0, -1.0],
        [2.0, math.nan, 1.0],
        [2.0, 1.0, 1.0, 1.0, 1.0],
    ],
)
def test_a_state_that_cannot_be_one_is_refused(numbers):
    with pytest.raises(ValueError, match="reward history of prompt 4: expected"):
        RewardHistory.from_state({"4": numbers, "9": [1.0, 2.0, 0.0]})


@pytest.mark.parametrize(
    ("rewards", "prompts", "message"),
    [
        (f64(1.0), torch.tensor(0), r"rewards must have shape \(N,\) or \(N, C\).*got \(\)"),
        (f64([]), torch.tensor([], dtype=torch.int64), r"got \(0,\)"),
        (f64([1.0, 2.0]), torch.tensor([0]), r"prompt_ids must be integers of shape \(2,\).*\(1,\)"),
        (f64([1.0]), f64([1.0]), "prompt_ids must be integers.*float64"),
        (f64([[1.0, 2.0]]), torch.tensor([0]), "has 1 columns of rewards, got 2"),
        (f64([math.inf]), torch.tensor([0]), r"finite, got \[inf\] at position 0"),
    ],
)
def test_wrong_input_is_refused_with_its_value(rewards, prompts, message):
    history = RewardHistory()
    history.commit(torch.tensor([0]), f64([1.0]))
    with pytest.raises(ValueError, match=message):
        history.advantages(rewards, prompts, GLOBAL)
    with pytest.raises(ValueError, match=message):
        history.commit(prompts, rewards)
