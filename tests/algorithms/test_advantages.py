import math

import pytest
import torch

from omni_async.algorithms.advantages import centred, clip_binds, global_scale
from omni_async.algorithms.aggregation import aggregate_advantages
from omni_async.config.algorithm import Advantage

REWARDS = torch.tensor([1.0, 3.0, 2.0, 8.0, 5.0], dtype=torch.float64)
GROUPS = torch.tensor([7, 7, -1, -1, 3])  # means 2, 5; the 5.0 is alone
CENTRED = torch.tensor([-1.0, 1.0, -3.0, 3.0, 0.0], dtype=torch.float64)
SQUARES = 2.8**2 + 0.8**2 + 1.8**2 + 4.2**2 + 1.2**2  # around the mean of all, 3.8


def advantages(rewards=REWARDS, groups=GROUPS, **settings):
    """Computes advantages of one scorer, whose weight is 1."""
    weights = torch.ones(1, dtype=torch.float64)
    return aggregate_advantages(rewards[..., None], weights, groups, Advantage(**settings))


def close(got, expected):
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=got.dtype), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("ddof", [0, 1])
def test_global_std_by_hand(ddof):
    close(advantages(ddof=ddof), CENTRED / (math.sqrt(SQUARES / (5 - ddof)) + 1e-4))


@pytest.mark.parametrize(("ddof", "stds"), [(0, (1.0, 3.0)), (1, (math.sqrt(2), math.sqrt(18)))])
def test_group_std_by_hand(ddof, stds):
    small, large = 1 / (stds[0] + 1e-4), 3 / (stds[1] + 1e-4)
    close(advantages(std="group", ddof=ddof), [-small, small, -large, large, 0.0])


@pytest.mark.parametrize(("eps", "divisors"), [(1e-6, (1.0, 3.0)), (2.0, (2.0, 3.0)), (7.0, (7.0, 7.0))])
def test_a_floor_replaces_stds_below_it_and_leaves_others_alone(eps, divisors):
    small, large = 1 / divisors[0], 3 / divisors[1]
    close(advantages(std="group", ddof=0, eps=eps, eps_form="floor"), [-small, small, -large, large, 0.0])
    close(advantages(ddof=0, eps=eps, eps_form="floor"), CENTRED / max(math.sqrt(SQUARES / 5), eps))
    assert global_scale(REWARDS, Advantage(ddof=0, eps=eps, eps_form="floor")) == pytest.approx(
        1 / max(math.sqrt(SQUARES / 5), eps), rel=1e-15
    )


def test_a_floor_can_decide_whether_the_clip_binds():
    settings = {"std": "group", "ddof": 0, "clip_max": 0.9, "eps": 0.5}
    assert not clip_binds(REWARDS, GROUPS, Advantage(**settings))  # 1 / 1.5 and 3 / 3.5
    assert clip_binds(REWARDS, GROUPS, Advantage(**settings, eps_form="floor"))  # both 1


def test_no_std_is_the_difference_from_the_group_mean():
    close(advantages(std="none"), CENTRED)


def test_advantages_are_clamped_on_both_sides():
    close(advantages(std="none", clip_max=2.0), [-1.0, 1.0, -2.0, 2.0, 0.0])
    assert clip_binds(REWARDS, GROUPS, Advantage(std="none", clip_max=2.0))
    assert not clip_binds(REWARDS, GROUPS, Advantage(std="none", clip_max=3.0))


@pytest.mark.parametrize("std", ["global", "group", "none"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_a_singleton_gets_zero_even_alone(std, ddof):
    close(advantages(torch.tensor([4.0]), torch.tensor([0]), std=std, ddof=ddof), [0.0])


@pytest.mark.parametrize("std", ["global", "group", "none"])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("eps_form", ["added", "floor"])
def test_equal_rewards_give_exact_zeros_without_eps(std, ddof, eps_form):
    rewards = torch.full((6,), 0.1, dtype=torch.float64)
    assert rewards.mean() != 0.1  # so rounding would show
    got = advantages(rewards, torch.tensor([0, 0, 0, 1, 1, 1]), std=std, ddof=ddof, eps=0.0, eps_form=eps_form)
    assert got.tolist() == [0.0] * 6


def test_float32_rewards_keep_their_dtype_and_float64_accuracy():
    rewards = REWARDS.float() + 1e6
    got = advantages(rewards)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, advantages().float(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("ddof", [0, 1])
def test_centred_rewards_times_the_global_scale_are_the_advantages(ddof):
    pieces = torch.cat([centred(REWARDS[:2]), centred(REWARDS[2:4]), centred(REWARDS[4:])])
    close(pieces * global_scale(REWARDS, Advantage(ddof=ddof)), advantages(ddof=ddof))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": torch.tensor([1.0, math.nan])}, "finite, got nan at position 1"),
        ({"groups": torch.tensor([0, 0, 1])}, r"group_ids must be integers of shape \(2,\)"),
        ({"groups": torch.tensor([0.0, 0.0])}, "group_ids must be integers.*float32"),
        ({"std": "batch"}, "got 'batch'"),
        ({"ddof": 2}, "ddof must be 0 or 1, got 2"),
        ({"eps": -1.0}, "eps must be >= 0, got -1.0"),
        ({"eps_form": "max"}, "eps_form must be 'added' or 'floor', got 'max'"),
        ({"clip_max": 0.0}, "clip_max must be > 0, got 0.0"),
    ],
)
def test_wrong_input_is_refused_with_its_value(change, message):
    with pytest.raises(ValueError, match=message):
        advantages(**({"rewards": torch.tensor([1.0, 2.0]), "groups": torch.tensor([0, 0])} | change))


def test_rewards_of_several_scorers_are_no_column():
    with pytest.raises(ValueError, match=r"rewards must have shape \(N,\) with N >= 1, got \(1, 2\)"):
        centred(torch.tensor([[1.0, 2.0]]))
