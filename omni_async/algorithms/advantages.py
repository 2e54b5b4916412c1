"""From rewards to group-relative advantages: (r - group mean) / (std + eps), clamped. float64 inside.

Groups are whole here, before any batching: a group's mean over part of its samples would be a different algorithm. Group membership is
an integer id, never the prompt's text, because a prompt may occur twice in an update.

Public references differ in the std: VeRL-Omni takes ddof 1 and flow_grpo ddof 0, both add 1e-4 to it; "none" is Dr. GRPO (arXiv
2503.20783). A group of one gets 0 here, as in VeRL-Omni's diffusion code (VeRL's token code would give it the raw reward).

Streaming: with std="global" an objective that is positively homogeneous in the advantage may accumulate gradients with `centred` rewards
as groups arrive and multiply the sum by `global_scale` at the end, unless the clamp binds (`clip_binds`, and in advance `advantage_bound`).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

StdKind = Literal["global", "group", "none"]


def group_advantages(rewards: Tensor, group_ids: Tensor, *, std: StdKind, ddof: int, eps: float, clip_max: float) -> Tensor:
    """(N,) in rewards' dtype. `rewards` (N,) finite, `group_ids` (N,) integers in any order.

    std: "global" divides by the std of all N rewards + eps, "group" by the group's own + eps, "none" by nothing; ddof (0 or 1) is
    subtracted from the count in the variance. Equal rewards give exactly 0.
    """
    if not clip_max > 0:
        raise ValueError(f"clip_max must be > 0, got {clip_max}")
    return _unclipped(rewards, group_ids, std, ddof, eps).clamp(-clip_max, clip_max).to(rewards.dtype)


def clip_binds(rewards: Tensor, group_ids: Tensor, *, std: StdKind, ddof: int, eps: float, clip_max: float) -> bool:
    """Whether the clamp changes any of these advantages."""
    return bool((_unclipped(rewards, group_ids, std, ddof, eps).abs() > clip_max).any())


def advantage_bound(num_rewards: int, group_size: int, *, std: StdKind, ddof: int) -> float:
    """No advantage of an update of `num_rewards` in groups of at most `group_size` exceeds this, whatever the rewards.

    A deviation d from a group's mean forces the group's squares to at least d^2 K / (K - 1), and these are part of the total
    (N - ddof) std^2; with std="group" N is K. Infinite for "none".
    """
    if std == "none":
        return math.inf
    count = num_rewards if std == "global" else group_size
    return math.sqrt((count - ddof) * (group_size - 1) / group_size)


def centred(rewards: Tensor) -> Tensor:
    """Rewards (K,) of one group minus their mean, float64; exact zeros when all are equal."""
    values = _finite64(rewards)
    if values.max() == values.min():
        return torch.zeros_like(values)
    return values - values.mean()


def global_scale(rewards: Tensor, *, ddof: int, eps: float) -> float:
    """1 / (std + eps) of all of an update's rewards (N,). With a single reward std is 1; if std + eps is 0, the scale is 0: no signal."""
    return _scale(_finite64(rewards), ddof, eps)


def _unclipped(rewards: Tensor, group_ids: Tensor, std: StdKind, ddof: int, eps: float) -> Tensor:
    if std not in ("global", "group", "none"):
        raise ValueError(f"std must be 'global', 'group' or 'none', got {std!r}")
    if group_ids.is_floating_point() or group_ids.shape != rewards.shape:
        raise ValueError(
            f"group_ids must be integers of shape {tuple(rewards.shape)}, got {group_ids.dtype} of shape {tuple(group_ids.shape)}"
        )
    values = _finite64(rewards)
    whole = _scale(values, ddof, eps) if std == "global" else 1.0
    advantages = torch.empty_like(values)
    for group in sorted(set(group_ids.tolist())):
        members = group_ids == group
        own = values[members]
        advantages[members] = centred(own) * (_scale(own, ddof, eps) if std == "group" else whole)
    return advantages


def _scale(values: Tensor, ddof: int, eps: float) -> float:
    if ddof not in (0, 1):
        raise ValueError(f"ddof must be 0 or 1, got {ddof}")
    if eps < 0:
        raise ValueError(f"eps must be >= 0, got {eps}")
    if len(values) == 1:
        deviation = 1.0
    elif values.max() == values.min():
        deviation = 0.0
    else:
        deviation = float(values.std(correction=ddof))
    return 1 / (deviation + eps) if deviation + eps > 0 else 0.0


def _finite64(rewards: Tensor) -> Tensor:
    if rewards.ndim != 1 or len(rewards) == 0:
        raise ValueError(f"rewards must have shape (N,) with N >= 1, got {tuple(rewards.shape)}")
    values = rewards.detach().to(torch.float64)
    if not values.isfinite().all():
        position = int(values.isfinite().logical_not().nonzero()[0])
        raise ValueError(f"rewards must be finite, got {values[position].item()} at position {position}")
    return values
