"""Combines several scorers into advantages: rewards (N, K), a weight per scorer, weights not normalised.

Settings: `algorithm.advantage`.

  rewards     r = sum_k w_k r_k, then the advantages of r (VeRL-Omni, Flow-Factory's `sum`, MixGRPO's `reward_aggr`)
  advantages  A_k of each scorer alone, A = sum_k w_k A_k (MixGRPO's `advantage_aggr`): with a std, scorers count
              by weight, not by scale
  gdpo        A_k divided by the group's std whatever `std` says, A = sum_k w_k A_k, whitened over the
              update (GDPO, arXiv 2601.05242)

The clamp comes last and once. Where ddof and eps occur twice, in A_k and in whitening, they are the same settings both
times.
"""

from __future__ import annotations

from collections import Counter

import msgspec
import torch
from torch import Tensor

from omni_async.algorithms.advantages import global_scale, unclipped_advantages
from omni_async.algorithms.history import RewardHistory
from omni_async.config.algorithm import Advantage


def aggregate_advantages(
    rewards: Tensor,
    weights: Tensor,
    group_ids: Tensor,
    settings: Advantage,
    history: RewardHistory | None = None,
    prompt_ids: Tensor | None = None,
) -> Tensor:
    """Return (N,) in rewards' dtype, float64 inside.

    `rewards` (N, K) finite, `weights` (K,), `group_ids` (N,) integers in any order.

    With settings.track_prompts `history` and `prompt_ids` (N,) replace groups, so that groups of one prompt share
    statistics; `history` is read only: commit `tracked_rewards` to it when the update is done. Otherwise both are
    ignored. Groups of one get 0, as does a prompt's only reward ever."""
    if not settings.clip_max > 0:
        raise ValueError(f"clip_max must be > 0, got {settings.clip_max}")
    columns = tracked_rewards(rewards, weights, settings)
    each = msgspec.structs.replace(settings, std="group") if settings.aggregate == "gdpo" else settings
    if not settings.track_prompts:
        of_groups = [unclipped_advantages(column, group_ids, each) for column in columns.unbind(1)]
        advantages = _weighted(torch.stack(of_groups, dim=1), weights, settings)
        if settings.aggregate == "gdpo":
            # Every group's sum to 0, so the update's mean is 0 but for rounding; without subtracting it, no signal
            # stays exactly 0.
            advantages = advantages * global_scale(advantages, settings)
    else:
        if history is None or prompt_ids is None:
            raise ValueError("advantage.track_prompts needs a history and prompt_ids")
        advantages = _weighted(history.advantages(columns, prompt_ids, each), weights, settings)
        if settings.aggregate == "gdpo":
            whitened = (advantages - advantages.mean()) * global_scale(advantages, settings)
            advantages = whitened.masked_fill(_without_peers(prompt_ids, history), 0.0)
    return advantages.clamp(-settings.clip_max, settings.clip_max).to(rewards.dtype)


def tracked_rewards(rewards: Tensor, weights: Tensor, settings: Advantage) -> Tensor:
    """Return the columns that advantages are computed from, and that a `RewardHistory` keeps.

    (N, 1) float64, the weighted sum, with aggregate="rewards"; the scorers' own (N, K) otherwise."""
    if rewards.ndim != 2 or rewards.numel() == 0 or weights.shape != rewards.shape[1:]:
        raise ValueError(
            f"expected rewards (N, K) and weights (K,), got {tuple(rewards.shape)} and {tuple(weights.shape)}"
        )
    columns = rewards.detach().to(torch.float64)
    if settings.aggregate != "rewards":
        return columns
    total = torch.zeros(len(columns), dtype=torch.float64)
    # In this order the sum is to the bit the one that `Score.value` holds.
    for weight, column in zip(weights.tolist(), columns.unbind(1), strict=True):
        total = total + weight * column
    return total.unsqueeze(1)


def _weighted(advantages: Tensor, weights: Tensor, settings: Advantage) -> Tensor:
    """Return (N,) from (N, C); with aggregate="rewards" the weights are in the rewards already."""
    return advantages[:, 0] if settings.aggregate == "rewards" else advantages @ weights.to(torch.float64)


def _without_peers(prompt_ids: Tensor, history: RewardHistory) -> Tensor:
    """Return (N,) bool: True for the only reward its prompt ever had, which has nothing to be compared with."""
    rewards = Counter(prompt_ids.tolist())
    return torch.tensor([rewards[prompt] + history.count(prompt) == 1 for prompt in prompt_ids.tolist()])
