"""Turns one reward per sample into group-relative advantages: (r - group mean) / (std + eps), clamped. float64 inside.

Groups are whole here, before any batching: a group's mean over part of its samples would be a different algorithm.
Group membership is an integer id, never the prompt's text, because a prompt may occur twice in an update.

Public references differ in the std: VeRL-Omni takes ddof 1 and flow_grpo ddof 0, both add 1e-4 to it; Flow-Factory
takes ddof 0 and max(std, 1e-6); "none" is Dr. GRPO (arXiv 2503.20783). A group of one gets 0 here, as in VeRL-Omni's
diffusion code (VeRL's token code would give it the raw reward).

Streaming: with std="global" an objective that is positively homogeneous in the advantage may accumulate gradients with
`centred` rewards as groups arrive and multiply the sum by `global_scale` at the end, unless the clamp binds
(`clip_binds`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from omni_async.config.algorithm import Advantage


def unclipped_advantages(rewards: Tensor, group_ids: Tensor, settings: Advantage) -> Tensor:
    """Return advantages (N,) float64 before the clamp. `rewards` (N,) finite, `group_ids` (N,) integers in any order.

    settings.std: "global" divides by the std of all N rewards, "group" by the group's own, "none" by nothing; ddof (0
    or 1) is subtracted from the count in the variance. Equal rewards give exactly 0."""
    if settings.std not in ("global", "group", "none"):
        raise ValueError(f"std must be 'global', 'group' or 'none', got {settings.std!r}")
    if group_ids.is_floating_point() or group_ids.shape != rewards.shape:
        raise ValueError(
            f"group_ids must be integers of shape {tuple(rewards.shape)}, got {group_ids.dtype} of shape"
            f" {tuple(group_ids.shape)}"
        )
    values = _finite64(rewards)
    whole = global_scale(values, settings) if settings.std == "global" else 1.0
    advantages = torch.empty_like(values)
    for group in sorted(set(group_ids.tolist())):
        members = group_ids == group
        own = values[members]
        scale = global_scale(own, settings) if settings.std == "group" else whole
        advantages[members] = centred(own) * scale
    return advantages


def clip_binds(rewards: Tensor, group_ids: Tensor, settings: Advantage) -> bool:
    """Return whether the clamp to +-clip_max changes any of these advantages."""
    return bool((unclipped_advantages(rewards, group_ids, settings).abs() > settings.clip_max).any())


def centred(rewards: Tensor) -> Tensor:
    """Subtract their mean from the rewards (K,) of one group, in float64; exact zeros when all are equal."""
    values = _finite64(rewards)
    if values.max() == values.min():
        return torch.zeros_like(values)
    return values - values.mean()


def global_scale(rewards: Tensor, settings: Advantage) -> float:
    """Return the factor for all of an update's rewards (N,) with std="global": `inverse_std` of their std.

    A single reward has std 1."""
    values = _finite64(rewards)
    if settings.ddof not in (0, 1):
        raise ValueError(f"ddof must be 0 or 1, got {settings.ddof}")
    if len(values) == 1:
        deviation = 1.0
    elif values.max() == values.min():
        deviation = 0.0
    else:
        deviation = float(values.std(correction=settings.ddof))
    return inverse_std(deviation, settings)


def inverse_std(deviation: float, settings: Advantage) -> float:
    """Return 1 / (deviation + eps) with eps_form "added", 1 / max(deviation, eps) with "floor".

    0 where that would divide by 0, since there is no signal."""
    eps, form = settings.eps, settings.eps_form
    if eps < 0:
        raise ValueError(f"eps must be >= 0, got {eps}")
    if form not in ("added", "floor"):
        raise ValueError(f"eps_form must be 'added' or 'floor', got {form!r}")
    divisor = deviation + eps if form == "added" else max(deviation, eps)
    return 1 / divisor if divisor > 0 else 0.0


def _finite64(rewards: Tensor) -> Tensor:
    if rewards.ndim != 1 or len(rewards) == 0:
        raise ValueError(f"rewards must have shape (N,) with N >= 1, got {tuple(rewards.shape)}")
    values = rewards.detach().to(torch.float64)
    if not values.isfinite().all():
        position = int(values.isfinite().logical_not().nonzero()[0])
        raise ValueError(f"rewards must be finite, got {values[position].item()} at position {position}")
    return values
