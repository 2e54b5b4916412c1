"""Estimates the proximal policy's log-prob without a separate forward pass, from log-probs already at hand."""

from __future__ import annotations

import torch
from torch import Tensor


def interpolated_log_prob(behaviour: Tensor, current: Tensor, staleness: Tensor) -> Tensor:
    """Interpolate log p = log b + alpha (log theta - log b), as if log-probs moved linearly with versions.

    This is AReaL's approximation of the decoupled loss: with v the version being made and v_b the one that took the
    step, alpha = (v - 1 - v_b) / (v - v_b) = s / (s + 1), s = `staleness`.

    The result has shape and dtype of `behaviour` and is detached from both. `behaviour` are recorded log-probs,
    `current` those of the policy in training, of the same shape and unit; `staleness` integers >= 0 of that shape, a
    step's own where versions changed in mid-trajectory. Steps of staleness 0 get behaviour: how engine and trainer
    differ stays in the ratio."""
    for name, value in (("current", current), ("staleness", staleness)):
        if value.shape != behaviour.shape:
            raise ValueError(
                f"{name} must have shape {tuple(behaviour.shape)} like behaviour, got {tuple(value.shape)}"
            )
    if staleness.is_floating_point() or staleness.dtype == torch.bool:
        raise ValueError(f"staleness must be integers, got {staleness.dtype}")
    if (staleness < 0).any():
        raise ValueError(f"staleness must be >= 0, got {staleness.min().item()}")
    start, end, age = (value.detach().to(torch.float64) for value in (behaviour, current, staleness))
    return (start + age / (age + 1) * (end - start)).to(behaviour.dtype)
