import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_async.algorithms.advantages import unclipped_advantages
from omni_async.algorithms.aggregation import aggregate_advantages, tracked_rewards
from omni_async.algorithms.history import RewardHistory
from omni_async.config.algorithm import Advantage

# Two scorers, two groups of two and one of one.
REWARDS = torch.tensor([[1.0, 10.0], [3.0, 10.0], [2.0, 50.0], [8.0, 20.0], [5.0, 70.0]], dtype=torch.float64)
WEIGHTS = torch.tensor([2.0, -0.5], dtype=torch.float64)
GROUPS = torch.tensor([7, 7, -1, -1, 3])


def close(got, expected, atol=1e-12):
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=got.dtype), atol=atol, rtol=1e-10)


def naive(rewards, weights, groups, s):
    """Computes advantages straight from the formulas, a row and a scorer at a time."""

    def scale(values):
        deviation = np.std(values, ddof=s.ddof) if len(values) > 1 else 1.0
        return 1 / (deviation + s.eps if s.eps_form == "added" else max(deviation, s.eps))

    def own(column, std):
        advantages = []
        for group, reward in zip(groups, column, strict=True):
            peers = [r for g, r in zip(groups, column, strict=True) if g == group]
            factor = {"global": scale(column), "group": scale(peers), "none": 1.0}[std]
            advantages.append((reward - np.mean(peers)) * factor)
        return advantages

    if s.aggregate == "rewards":
        result = own([sum(w * r for w, r in zip(weights, row, strict=True)) for row in rewards], s.std)
    else:
        std = "group" if s.aggregate == "gdpo" else s.std
        columns = [own(column, std) for column in zip(*rewards, strict=True)]
        result = [sum(w * a for w, a in zip(weights, row, strict=True)) for row in zip(*columns, strict=True)]
    if s.aggregate == "gdpo":
        result = [(a - np.mean(result)) * scale(result) for a in result]
    return [min(max(a, -s.clip_max), s.clip_max) for a in result]


def test_rewards_are_summed_before_advantages_are_taken():
    total = torch.tensor([-3.0, 1.0, -21.0, 6.0, -25.0], dtype=torch.float64)
    for std in ("global", "group", "none"):
        got = aggregate_advantages(REWARDS, WEIGHTS, GROUPS, Advantage(std=std))
        assert torch.equal(got, unclipped_advantages(total, GROUPS, Advantage(std=std)).clamp(-5, 5))


def test_one_scorer_of_weight_one_is_the_plain_advantage_bit_for_bit():
    rewards = torch.rand(24, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    groups = torch.arange(24) // 6
    plain = unclipped_advantages(rewards[:, 0], groups, Advantage())
    for aggregate in ("rewards", "advantages"):
        assert torch.equal(
            aggregate_advantages(rewards, torch.ones(1, dtype=torch.float64), groups, Advantage(aggregate=aggregate)),
            plain,
        )


def test_the_clamp_comes_after_the_sum():
    # Alone each scorer's advantages reach 3 and 15 and would be clamped; their weighted sum stays within +-3.
    rewards = torch.tensor([[2.0, 50.0], [8.0, 20.0]], dtype=torch.float64)
    weights = torch.tensor([1.0, 0.2], dtype=torch.float64)
    options = Advantage(aggregate="advantages", std="none", clip_max=2.0)
    close(aggregate_advantages(rewards, weights, torch.tensor([0, 0]), options), [0.0, 0.0])
    close(
        aggregate_advantages(
            rewards, -weights * 9, torch.tensor([0, 0]), Advantage(aggregate="advantages", std="none")
        ),
        [0.0, 0.0],
    )
    close(aggregate_advantages(rewards[:, :1], weights[:1], torch.tensor([0, 0]), options), [-2.0, 2.0])


rows_of_rewards = st.integers(1, 3).flatmap(
    lambda scorers: st.tuples(
        st.lists(
            st.tuples(st.integers(0, 3), *[st.integers(-400, 400).map(lambda n: n / 8) for _ in range(scorers)]),
            min_size=1,
            max_size=16,
        ),
        st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=scorers, max_size=scorers),
    )
)


@given(
    data=rows_of_rewards,
    aggregate=st.sampled_from(["rewards", "advantages", "gdpo"]),
    std=st.sampled_from(["global", "group", "none"]),
    ddof=st.sampled_from([0, 1]),
    eps=st.sampled_from([1e-4, 0.5]),
    eps_form=st.sampled_from(["added", "floor"]),
)
@settings(max_examples=150, deadline=None)
def test_advantages_are_those_of_a_loop_over_rows_and_scorers(data, aggregate, std, ddof, eps, eps_form):
    rows, weights = data
    groups, rewards = [row[0] for row in rows], [row[1:] for row in rows]
    options = Advantage(aggregate=aggregate, std=std, ddof=ddof, eps=eps, eps_form=eps_form, clip_max=4.0)
    got = aggregate_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(weights, dtype=torch.float64),
        torch.tensor(groups),
        options,
    )
    close(got, naive(rewards, weights, groups, options), atol=1e-8)
    for group in set(groups):
        if groups.count(group) == 1:
            assert got[groups.index(group)] == 0.0


@pytest.mark.parametrize("aggregate", ["rewards", "advantages", "gdpo"])
@pytest.mark.parametrize("eps", [0.0, 1e-4])
def test_groups_of_equal_rewards_get_exact_zeros_next_to_others(aggregate, eps):
    rewards = torch.tensor([[0.1, 0.3]] * 3 + [[0.2, 0.7], [0.3, 0.1], [0.7, 0.9]], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    options = Advantage(aggregate=aggregate, eps=eps, std="group")
    got = aggregate_advantages(rewards, WEIGHTS.abs(), groups, options)
    assert got[:3].tolist() == [0.0, 0.0, 0.0] and got[3:].abs().min() > 0.1


def test_the_dtype_is_kept_and_the_arithmetic_is_float64():
    got = aggregate_advantages(REWARDS.float() + 1e6, WEIGHTS.float(), GROUPS, Advantage(aggregate="gdpo"))
    assert got.dtype == torch.float32
    torch.testing.assert_close(
        got, aggregate_advantages(REWARDS, WEIGHTS, GROUPS, Advantage(aggregate="gdpo")).float(), atol=1e-5, rtol=0
    )


def test_tracked_are_the_weighted_sum_or_every_scorer():
    total = tracked_rewards(REWARDS, WEIGHTS, Advantage())
    assert total.squeeze(1).tolist() == [
        sum(w * r for w, r in zip([2.0, -0.5], row, strict=True)) for row in REWARDS.tolist()
    ]
    for aggregate in ("advantages", "gdpo"):
        assert torch.equal(tracked_rewards(REWARDS, WEIGHTS, Advantage(aggregate=aggregate)), REWARDS)


@pytest.mark.parametrize("aggregate", ["rewards", "advantages", "gdpo"])
@pytest.mark.parametrize("std", ["global", "group", "none"])
def test_an_empty_history_of_prompts_is_groups_by_prompt(aggregate, std):
    options = Advantage(aggregate=aggregate, std=std, track_prompts=True)
    prompts = torch.tensor([4, 4, 4, 9, 9])
    got = aggregate_advantages(REWARDS, WEIGHTS, torch.tensor([0, 0, 1, 2, 2]), options, RewardHistory(), prompts)
    close(got, aggregate_advantages(REWARDS, WEIGHTS, prompts, Advantage(aggregate=aggregate, std=std)))


@pytest.mark.parametrize("aggregate", ["rewards", "advantages", "gdpo"])
def test_earlier_rewards_of_a_prompt_count(aggregate):
    """Compares with the formula over the concatenation of what was committed and what is new; prompt 5 was never seen
    before."""
    options = Advantage(aggregate=aggregate, std="group", ddof=0, eps=1e-3, track_prompts=True)
    earlier, prompts = torch.tensor([[0.0, 30.0], [4.0, 90.0], [1.0, 20.0]], dtype=torch.float64), [1, 1, 2]
    ids = torch.tensor([1, 1, 2, 2, 5])
    history = RewardHistory()
    history.commit(torch.tensor(prompts), tracked_rewards(earlier, WEIGHTS, options))
    before = history.state()
    got = aggregate_advantages(REWARDS, WEIGHTS, GROUPS, options, history, ids)
    assert history.state() == before

    everything, everyone = np.concatenate([earlier.numpy(), REWARDS.numpy()]), np.array([*prompts, *ids.tolist()])
    if aggregate == "rewards":
        everything = everything @ WEIGHTS.numpy()[:, None]
    weights = [1.0] if aggregate == "rewards" else WEIGHTS.tolist()
    expected = np.zeros(5)
    for row, prompt in enumerate(ids.tolist()):
        seen = everything[everyone == prompt]
        for k, weight in enumerate(weights):
            spread = np.std(seen[:, k]) if len(seen) > 1 else 1.0
            expected[row] += weight * (everything[3 + row, k] - np.mean(seen[:, k])) / (spread + 1e-3)
    if aggregate == "gdpo":
        expected = (expected - expected.mean()) / (expected.std() + 1e-3)
        expected[4] = 0.0
    close(got, expected)
    assert got[4] == 0.0 and got[:4].abs().min() > 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": REWARDS[:, 0]}, r"rewards \(N, K\) and weights \(K,\), got \(5,\) and \(2,\)"),
        ({"weights": WEIGHTS[:1]}, r"got \(5, 2\) and \(1,\)"),
        ({"rewards": REWARDS.log() - math.inf}, "finite, got -inf at position 0"),
        ({"group_ids": GROUPS[:2]}, r"group_ids must be integers of shape \(5,\)"),
        ({"settings": Advantage(track_prompts=True)}, "track_prompts needs a history and prompt_ids"),
        (
            {"settings": Advantage(track_prompts=True), "history": RewardHistory()},
            "track_prompts needs a history and prompt_ids",
        ),
        ({"settings": Advantage(clip_max=0.0)}, "clip_max must be > 0"),
    ],
)
def test_wrong_input_is_refused_with_its_value(change, message):
    whole = {"rewards": REWARDS, "weights": WEIGHTS, "group_ids": GROUPS, "settings": Advantage(aggregate="advantages")}
    with pytest.raises(ValueError, match=message):
        aggregate_advantages(**(whole | change))
