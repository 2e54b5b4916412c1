"""Tests advantages of an update and over a run against their formulas, and the pair of a group."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from omni_async.algorithms.advantages import (
    RewardHistory,
    aggregate_advantages,
    best_and_worst,
    centred,
    clip_binds,
    global_scale,
    tracked_rewards,
    unclipped_advantages,
)
from omni_async.config.algorithm import Advantage

STDS, AGGREGATES = ("global", "group", "none"), ("rewards", "advantages", "gdpo")
GLOBAL, GROUP, NONE = (Advantage(std=std, ddof=0) for std in STDS)
stds, aggregates, ddofs = (
    pytest.mark.parametrize(name, values)
    for name, values in (("std", STDS), ("aggregate", AGGREGATES), ("ddof", [0, 1]))
)


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


# Two scorers, two groups of two and one of one.
REWARDS = f64([[1.0, 10.0], [3.0, 10.0], [2.0, 50.0], [8.0, 20.0], [5.0, 70.0]])
WEIGHTS = f64([2.0, -0.5])
GROUPS = torch.tensor([7, 7, -1, -1, 3])
ONE = f64([1.0, 3.0, 2.0, 8.0, 5.0])  # group means 2, 5; the 5.0 is alone
CENTRED = f64([-1.0, 1.0, -3.0, 3.0, 0.0])


def advantages(rewards=ONE, groups=GROUPS, **settings):
    """Computes advantages of one scorer, whose weight is 1."""
    return aggregate_advantages(rewards[..., None], f64([1.0]), groups, Advantage(**settings))


def close(got, expected, atol=1e-12):
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=got.dtype), atol=atol, rtol=1e-10)


def inverse(values, s):
    """Returns 1 / std of some rewards in the settings' form of eps."""
    deviation = np.std(values, ddof=s.ddof) if len(values) > 1 else 1.0
    return 1 / (deviation + s.eps if s.eps_form == "added" else max(deviation, s.eps))


def naive(rewards, weights, groups, s):
    """Computes advantages straight from the formulas, a row and a scorer at a time."""

    def own(column, std):
        found = []
        for group, reward in zip(groups, column, strict=True):
            peers = [r for g, r in zip(groups, column, strict=True) if g == group]
            factor = {"global": inverse(column, s), "group": inverse(peers, s), "none": 1.0}[std]
            found.append((reward - np.mean(peers)) * factor)
        return found

    rewards, weights = np.array(rewards), np.array(weights)
    if s.aggregate == "rewards":
        result = np.array(own(rewards @ weights, s.std))
    else:
        std = "group" if s.aggregate == "gdpo" else s.std
        result = np.array([own(column, std) for column in rewards.T]).T @ weights
    if s.aggregate == "gdpo":
        result = (result - result.mean()) * inverse(result, s)
    return result.clip(-s.clip_max, s.clip_max)


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
    aggregate=st.sampled_from(AGGREGATES),
    std=st.sampled_from(STDS),
    ddof=st.sampled_from([0, 1]),
    eps=st.sampled_from([1e-4, 0.5, 40.0]),
    eps_form=st.sampled_from(["added", "floor"]),
)
@settings(max_examples=200, deadline=None)
def test_advantages_are_those_of_a_loop_over_rows_and_scorers(data, aggregate, std, ddof, eps, eps_form):
    rows, weights = data
    groups, rewards = [row[0] for row in rows], [row[1:] for row in rows]
    options = Advantage(aggregate=aggregate, std=std, ddof=ddof, eps=eps, eps_form=eps_form, clip_max=4.0)
    got = aggregate_advantages(f64(rewards), f64(weights), torch.tensor(groups), options)
    close(got, naive(rewards, weights, groups, options), atol=1e-8)
    for group in set(groups):
        if groups.count(group) == 1:
            assert got[groups.index(group)] == 0.0


def test_the_clamp_is_on_both_sides_comes_after_the_sum_and_is_known_to_bind():
    close(advantages(std="none", clip_max=2.0), [-1.0, 1.0, -2.0, 2.0, 0.0])
    assert [clip_binds(ONE, GROUPS, Advantage(std="none", clip_max=limit)) for limit in (2.0, 3.0)] == [True, False]
    # A floor can decide it: 1 / 1.5 and 3 / 3.5, or both 1.
    near = {"std": "group", "ddof": 0, "clip_max": 0.9, "eps": 0.5}
    assert [clip_binds(ONE, GROUPS, Advantage(**near, eps_form=form)) for form in ("added", "floor")] == [False, True]
    # Alone each scorer's advantages reach 3 and 15 and would be clamped; their weighted sum is 0.
    options = Advantage(aggregate="advantages", std="none", clip_max=2.0)
    close(aggregate_advantages(REWARDS[2:4], f64([1.0, 0.2]), GROUPS[2:4], options), [0.0, 0.0])


@stds
@ddofs
def test_no_difference_is_exactly_zero_however_small_the_divisor(std, ddof):
    equal = torch.full((6,), 0.1, dtype=torch.float64)
    assert equal.mean() != 0.1  # so rounding would show
    for form in ("added", "floor"):
        got = advantages(equal, torch.tensor([0, 0, 0, 1, 1, 1]), std=std, ddof=ddof, eps=0.0, eps_form=form)
        assert got.tolist() == [0.0] * 6


@aggregates
@pytest.mark.parametrize("eps", [0.0, 1e-4])
def test_groups_of_equal_rewards_get_exact_zeros_next_to_others(aggregate, eps):
    rewards = f64([[0.1, 0.3]] * 3 + [[0.2, 0.7], [0.3, 0.1], [0.7, 0.9]])
    options = Advantage(aggregate=aggregate, eps=eps, std="group")
    got = aggregate_advantages(rewards, WEIGHTS.abs(), torch.tensor([0, 0, 0, 1, 1, 1]), options)
    assert got[:3].tolist() == [0.0, 0.0, 0.0] and got[3:].abs().min() > 0.1


def weighted(signed, groups, s):
    """Computes the weights of each form from signed advantages, a row at a time."""
    found = []
    for i, (group, own) in enumerate(zip(groups, signed, strict=True)):
        peers = [(j, a) for j, (g, a) in enumerate(zip(groups, signed, strict=True)) if g == group]
        if s.form == "reward_weighted":
            top = max(a for _, a in peers)  # no power of e overflows
            share = math.exp((own - top) / s.temperature) / sum(math.exp((a - top) / s.temperature) for _, a in peers)
        else:
            better = sum(a > own or (a == own and j < i) for j, a in peers)
            share = (better < s.best) / min(s.best, len(peers))
        found.append(min(len(peers) * share, s.clip_max))
    return found


@given(
    data=rows_of_rewards,
    aggregate=st.sampled_from(AGGREGATES),
    std=st.sampled_from(STDS),
    form=st.sampled_from(["reward_weighted", "best_of_n"]),
    temperature=st.sampled_from([0.3, 1.0, 20.0]),
    best=st.integers(1, 3),
)
@settings(max_examples=150, deadline=None)
def test_weights_are_those_of_a_loop_over_rows(data, aggregate, std, form, temperature, best):
    rows, weights = data
    groups, rewards = [row[0] for row in rows], f64([row[1:] for row in rows])
    signed = Advantage(aggregate=aggregate, std=std, clip_max=1e9)
    options = replace(signed, form=form, temperature=temperature, best=best, clip_max=3.5)
    ids = torch.tensor(groups)
    # Of these values, and not of naive's: rounding would break ties.
    before = aggregate_advantages(rewards, f64(weights), ids, signed).tolist()
    close(aggregate_advantages(rewards, f64(weights), ids, options), weighted(before, groups, options), atol=1e-9)


def test_reward_weights_are_the_softmax_of_rewards_and_have_mean_one():
    """Takes exp(r / T) = 1, 2, 5 and 4, 4, whose shares are eighths and halves."""
    rewards = 0.7 * f64([1.0, 4.0, 2.0, 4.0, 5.0]).log() + 3
    groups = torch.tensor([2, 5, 2, 5, 2])
    got = advantages(rewards, groups, form="reward_weighted", std="none", temperature=0.7)
    close(got, [3 / 8, 1.0, 6 / 8, 1.0, 15 / 8])


def test_the_best_share_the_weight_of_their_group_and_of_equal_rewards_the_first_are_best():
    rewards, groups = f64([0.0, 1.0, 1.0, 1.0, 9.0, 9.0, -7.0, 8.0]), torch.tensor([3, 3, 3, 3, 1, 1, 1, 1])
    for std in STDS:
        got = [advantages(rewards, groups, form="best_of_n", std=std, best=k).tolist() for k in (1, 2)]
        assert got == [[0, 4, 0, 0, 4, 0, 0, 0], [0, 2, 2, 0, 2, 2, 0, 0]]
    assert advantages(rewards, groups, form="best_of_n", clip_max=3.0)[1] == 3.0


@pytest.mark.parametrize("aggregate", ["rewards", "gdpo"])
def test_the_dtype_is_kept_and_the_arithmetic_is_float64(aggregate):
    options = Advantage(aggregate=aggregate)
    got = aggregate_advantages(REWARDS.float() + 1e6, WEIGHTS.float(), GROUPS, options)
    assert got.dtype == torch.float32
    exact = aggregate_advantages(REWARDS, WEIGHTS, GROUPS, options).float()
    torch.testing.assert_close(got, exact, atol=1e-5, rtol=0)


@ddofs
def test_centred_rewards_times_the_global_scale_are_the_advantages_as_are_those_of_one_scorer_to_the_bit(ddof):
    pieces = torch.cat([centred(ONE[:2]), centred(ONE[2:4]), centred(ONE[4:])])
    assert torch.equal(pieces, CENTRED)
    close(pieces * global_scale(ONE, Advantage(ddof=ddof)), advantages(ddof=ddof))
    for aggregate in ("rewards", "advantages"):
        plain = unclipped_advantages(ONE, GROUPS, Advantage(ddof=ddof))
        assert torch.equal(advantages(aggregate=aggregate, ddof=ddof), plain)


TRACKED = Advantage(track_prompts=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": REWARDS[:, 0]}, r"rewards \(N, K\) and weights \(K,\), got \(5,\) and \(2,\)"),
        ({"rewards": REWARDS.log() - math.inf}, "finite, got -inf at position 0"),
        ({"group_ids": GROUPS[:2]}, r"group_ids must be integers of shape \(5,\)"),
        ({"group_ids": GROUPS.double()}, "group_ids must be integers.*float64"),
        ({"settings": TRACKED, "history": RewardHistory()}, "track_prompts needs a history and prompt_ids"),
        ({"settings": Advantage(clip_max=0.0)}, "clip_max must be > 0, got 0.0"),
        ({"settings": Advantage(std="batch")}, "got 'batch'"),
        ({"settings": Advantage(ddof=2)}, "ddof must be 0 or 1, got 2"),
        ({"settings": Advantage(eps=-1.0)}, "eps must be >= 0, got -1.0"),
        ({"settings": Advantage(eps_form="max")}, "eps_form must be 'added' or 'floor', got 'max'"),
    ],
)
def test_wrong_input_is_refused_with_its_value(change, message):
    whole = {"rewards": REWARDS, "weights": WEIGHTS, "group_ids": GROUPS, "settings": Advantage(aggregate="advantages")}
    with pytest.raises(ValueError, match=message):
        aggregate_advantages(**(whole | change))
    with pytest.raises(ValueError, match=r"rewards must have shape \(N,\) with N >= 1, got \(1, 2\)"):
        centred(torch.tensor([[1.0, 2.0]]))


@given(
    updates=st.lists(
        st.lists(st.tuples(st.integers(0, 4), st.integers(-800, 800), st.integers(-80, 80)), min_size=1, max_size=8),
        min_size=1,
        max_size=5,
    ),
    std=st.sampled_from(STDS),
    ddof=st.sampled_from([0, 1]),
    eps=st.sampled_from([0.01, 20.0]),
    eps_form=st.sampled_from(["added", "floor"]),
)
@settings(max_examples=120, deadline=None)
def test_advantages_are_those_of_keeping_every_reward(updates, std, ddof, eps, eps_form):
    """Keeps lists, as flow_grpo's tracker does, for two scorers."""
    options = Advantage(std=std, ddof=ddof, eps=eps, eps_form=eps_form)
    history, kept = RewardHistory(), {}
    for update in updates:
        prompts, rewards = torch.tensor([row[0] for row in update]), f64([row[1:] for row in update]) / 16 + 100
        got = history.advantages(rewards, prompts, options)
        for prompt, row in zip(prompts.tolist(), rewards.tolist(), strict=True):
            kept.setdefault(prompt, []).append(row)
        for i, prompt in enumerate(prompts.tolist()):
            for k in range(2):
                own = [row[k] for row in kept[prompt]]
                scale = {
                    "none": 1.0,
                    "global": inverse(rewards[:, k].tolist(), options),
                    "group": inverse(own, options),
                }
                expected = (rewards[i, k].item() - np.mean(own)) * scale[std]
                assert got[i, k].item() == pytest.approx(expected, rel=1e-8, abs=1e-8)
        history.commit(prompts, rewards)
    assert [history.count(prompt) for prompt in range(5)] == [len(kept.get(prompt, [])) for prompt in range(5)]


@aggregates
def test_earlier_rewards_of_a_prompt_count(aggregate):
    """Takes the history's own advantages, scorer by scorer; prompt 5 was never seen before."""
    options = Advantage(aggregate=aggregate, std="group", ddof=0, eps=1e-3, track_prompts=True)
    earlier, prompts = f64([[0.0, 30.0], [4.0, 90.0], [1.0, 20.0]]), [1, 1, 2]
    ids = torch.tensor([1, 1, 2, 2, 5])
    history = RewardHistory()
    history.commit(torch.tensor(prompts), tracked_rewards(earlier, WEIGHTS, options))
    before = history.state()
    got = aggregate_advantages(REWARDS, WEIGHTS, GROUPS, options, history, ids)
    assert history.state() == before
    own = history.advantages(tracked_rewards(REWARDS, WEIGHTS, options), ids, options)
    expected = own[:, 0] if aggregate == "rewards" else own @ WEIGHTS
    if aggregate == "gdpo":
        expected = (expected - expected.mean()) * inverse(expected.tolist(), options)
        expected[4] = 0.0
    close(got, expected)
    assert got[4] == 0.0 and got[:4].abs().min() > 1e-3


@pytest.mark.parametrize("options", [GLOBAL, GROUP, NONE, Advantage(std="group", ddof=1, eps=0.0)])
def test_no_difference_from_the_past_is_exactly_zero(options):
    rewards, prompts = torch.full((3,), 0.1, dtype=torch.float64), torch.tensor([0, 0, 0])
    history = RewardHistory()
    for _ in range(3):
        assert history.advantages(rewards, prompts, options).tolist() == [0.0, 0.0, 0.0]
        history.commit(prompts, rewards)
    assert history.advantages(f64([4.0]), torch.tensor([1]), options).tolist() == [0.0]


def test_small_spreads_around_large_means_survive_many_updates():
    """Uses values for which a sum of squares would have no correct digit left."""
    rewards = 1e8 + torch.rand(200, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
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


NO_STATES = [], [1.0, 2.0], [0.0, 2.0, 0.0], [1.5, 2.0, 0.0], [2.0, 2.0, -1.0], [2.0, math.nan, 1.0]


@pytest.mark.parametrize("numbers", NO_STATES)
def test_a_state_that_cannot_be_one_is_refused(numbers):
    with pytest.raises(ValueError, match="reward history of prompt 4: expected"):
        RewardHistory.from_state({"4": numbers, "9": [1.0, 2.0, 0.0]})


@pytest.mark.parametrize(
    ("rewards", "prompts", "message"),
    [
        (f64(1.0), torch.tensor(0), r"rewards must have shape \(N,\) or \(N, C\).*got \(\)"),
        (f64([1.0, 2.0]), torch.tensor([0]), r"prompt_ids must be integers of shape \(2,\).*\(1,\)"),
        (f64([1.0]), f64([1.0]), "prompt_ids must be integers.*float64"),
        (f64([[1.0, 2.0]]), torch.tensor([0]), "has 1 columns of rewards, got 2"),
        (f64([math.inf]), torch.tensor([0]), r"finite, got \[inf\] at position 0"),
    ],
)
def test_a_history_refuses_wrong_input_with_its_value(rewards, prompts, message):
    history = RewardHistory()
    history.commit(torch.tensor([0]), f64([1.0]))
    for use in (lambda: history.advantages(rewards, prompts, GLOBAL), lambda: history.commit(prompts, rewards)):
        with pytest.raises(ValueError, match=message):
            use()
    assert history.state() == {"0": [1, 1.0, 0.0]}


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([-1.0, 0.0, 1.0]), max_size=8))
@example([5.0, 5.0, 5.0])
def test_the_first_of_the_best_and_the_first_other_of_the_worst_are_taken(rewards):
    if len(rewards) < 2:
        with pytest.raises(ValueError, match=f"needs at least 2 samples of a prompt, got {len(rewards)}"):
            best_and_worst(rewards)
        return
    best, worst = best_and_worst(rewards)
    assert best == rewards.index(max(rewards))
    assert worst == next(i for i, reward in enumerate(rewards) if reward == min(rewards) and i != best)
