"""Turns one reward per sample into group-relative advantages: (r - group mean) / (std + eps), clamped. float64 inside.

Groups are whole here, before any batching: a group's mean over part of its samples would be a different algorithm.
Group membership is an integer id, never the prompt's text, because a prompt may occur twice in an update.

Public references differ in the std: VeRL-Omni takes ddof 1 and flow_grpo ddof 0, both add 1e-4 to it; Flow-Factory
takes ddof 0 and max(std, 1e-6); "none" is Dr. GRPO (arXiv 2503.20783). A group of one gets 0 here, as in VeRL-Omni's
diffusion code (VeRL's token code would give it the raw reward).

Streaming: with std="global" an objective that is positively homogeneous in the advantage may accumulate gradients with
`centred` rewards as groups arrive and multiply the sum by `global_scale` at the end, unless the clamp binds
(`clip_binds`, and in advance `advantage_bound`).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

StdKind = Literal["global", "group", "none"]
EpsForm = Literal["added", "floor"]


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    std: StdKind,
    ddof: int,
    eps: float,
    clip_max: float,
    eps_form: EpsForm = "added",
) -> Tensor:
    """Returns (N,) in rewards' dtype. `rewards` (N,) finite, `group_ids` (N,) integers in any order.

    std: "global" divides by the std of all N rewards, "group" by the group's own, "none" by nothing; ddof (0 or 1) is
    subtracted from the count in the variance. eps_form: "added" divides by std + eps, "floor" by max(std, eps). Equal
    rewards give exactly 0.
    """
    if not clip_max > 0:
        raise ValueError(f"clip_max must be > 0, got {clip_max}")
    unclipped = unclipped_advantages(rewards, group_ids, std=std, ddof=ddof, eps=eps, eps_form=eps_form)
    return unclipped.clamp(-clip_max, clip_max).to(rewards.dtype)


def clip_binds(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    std: StdKind,
    ddof: int,
    eps: float,
    clip_max: float,
    eps_form: EpsForm = "added",
) -> bool:
    """Returns whether the clamp changes any of these advantages."""
    unclipped = unclipped_advantages(rewards, group_ids, std=std, ddof=ddof, eps=eps, eps_form=eps_form)
    return bool((unclipped.abs() > clip_max).any())


def advantage_bound(num_rewards: int, group_size: int, *, std: StdKind, ddof: int) -> float:
    """Returns a bound that no advantage of an update of `num_rewards` in groups of at most `group_size` exceeds,
    whatever the rewards.

    A deviation d from a group's mean forces the group's squares to at least d^2 K / (K - 1), and these are part of the
    total (N - ddof) std^2; with std="group" N is K. Infinite for "none".
    """
    if std == "none":
        return math.inf
    count = num_rewards if std == "global" else group_size
    return math.sqrt((count - ddof) * (group_size - 1) / group_size)


def centred(rewards: Tensor) -> Tensor:
    """Subtracts their mean from the rewards (K,) of one group, in float64; exact zeros when all are equal."""
    values = _finite64(rewards)
    if values.max() == values.min():
        return torch.zeros_like(values)
    return values - values.mean()


def global_scale(rewards: Tensor, *, ddof: int, eps: float, eps_form: EpsForm = "added") -> float:
    """Returns the factor for all of an update's rewards (N,) with std="global": `inverse_std` of their std. A single
    reward has std 1."""
    values = _finite64(rewards)
    if ddof not in (0, 1):
        raise ValueError(f"ddof must be 0 or 1, got {ddof}")
    if len(values) == 1:
        deviation = 1.0
    elif values.max() == values.min():
        deviation = 0.0
    else:
        deviation = float(values.std(correction=ddof))
    return inverse_std(deviation, eps, eps_form)


def inverse_std(deviation: float, eps: float, eps_form: EpsForm) -> float:
    """Returns 1 / (deviation + eps) for "added", 1 / max(deviation, eps) for "floor"; 0 where that would divide by 0,
    since there is no signal."""
    if eps < 0:
        raise ValueError(f"eps must be >= 0, got {eps}")
    if eps_form not in ("added", "floor"):
        raise ValueError(f"eps_form must be 'added' or 'floor', got {eps_form!r}")
    divisor = deviation + eps if eps_form == "added" else max(deviation, eps)
    return 1 / divisor if divisor > 0 else 0.0


def unclipped_advantages(
    rewards: Tensor, group_ids: Tensor, *, std: StdKind, ddof: int, eps: float, eps_form: EpsForm
) -> Tensor:
    """Computes `group_advantages` before the clamp, (N,) float64."""
    if std not in ("global", "group", "none"):
        raise ValueError(f"std must be 'global', 'group' or 'none', got {std!r}")
    if group_ids.is_floating_point() or group_ids.shape != rewards.shape:
        raise ValueError(
            f"group_ids must be integers of shape {tuple(rewards.shape)}, got {group_ids.dtype} of shape"
            f" {tuple(group_ids.shape)}"
        )
    values = _finite64(rewards)
    whole = global_scale(values, ddof=ddof, eps=eps, eps_form=eps_form) if std == "global" else 1.0
    advantages = torch.empty_like(values)
    for group in sorted(set(group_ids.tolist())):
        members = group_ids == group
        own = values[members]
        scale = global_scale(own, ddof=ddof, eps=eps, eps_form=eps_form) if std == "group" else whole
        advantages[members] = centred(own) * scale
    return advantages


def _finite64(rewards: Tensor) -> Tensor:
    if rewards.ndim != 1 or len(rewards) == 0:
        raise ValueError(f"rewards must have shape (N,) with N >= 1, got {tuple(rewards.shape)}")
    values = rewards.detach().to(torch.float64)
    if not values.isfinite().all():
        position = int(values.isfinite().logical_not().nonzero()[0])
        raise ValueError(f"rewards must be finite, got {values[position].item()} at position {position}")
    return values
