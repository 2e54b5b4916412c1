"""Computes importance weights w = p / b from log-ratios: exact or tempered, truncated, or 0 outside a band.

Whole-sample log-ratios (`sum`) make exact weights. The mean over D latent elements (`mean`, published code) makes their
D-th root, which differs from 1 by about 1e-5 at image sizes and corrects nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from omni_async.algorithms.correction.tempering import tempering_exponent
from omni_async.config.algorithm import Correction

MAX_EXPONENT = 20.0


def importance_weights(
    log_ratio: Tensor, settings: Correction, num_elements: int, kept: Tensor | None = None
) -> tuple[Tensor, float]:
    """Return (weights (N, W) float64, gamma) of L = `log_ratio` (N, W) in nats; w = exp(clamp(gamma e, +-20)).

    The exponent e is by row (`exponents`). gamma is 1 unless weights are `tempered`: then it is the
    `tempering_exponent` of the rows that reach the loss, those where `kept` (N, W) bool is True (all without it), so
    give a whole update; with none left it is 1. First weights outside `band` become 0 (IcePop), then the others are
    truncated at `cap`. `weights: none` gives ones. Rows that are not kept have weights like any other.

    Clamping and truncating keep the order of weights and shrink large ones most, which cannot lower the effective
    sample size."""
    if settings.weights == "none":
        return torch.ones_like(log_ratio), 1.0
    values = exponents(log_ratio, settings, num_elements)
    gamma = 1.0
    if settings.weights == "tempered":
        own = values.flatten() if kept is None else values[kept]
        gamma = tempering_exponent(own, settings.ess_target) if own.numel() else 1.0
    weight = (gamma * values).clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()
    if settings.band is not None:
        low, high = settings.band
        weight = torch.where((weight >= low) & (weight <= high), weight, 0.0)
    if settings.cap is not None:
        weight = weight.clamp(max=settings.cap)
    return weight, gamma


def exponents(log_ratio: Tensor, settings: Correction, num_elements: int) -> Tensor:
    """Return (N, W): L, or L / D with log_ratio `mean`, aggregated over a sample's steps as `level` says.

    Its steps share the result.

    `step` leaves it as it is. `trajectory`: the sum over steps of L, but the mean over steps of L / D. `sequence`: the
    sum over steps of either; VeRL-Omni's level of that name is the one of L / D."""
    values = per_element(log_ratio, settings, num_elements)
    if settings.level == "step":
        return values
    if settings.level == "trajectory" and settings.log_ratio == "mean":
        return values.mean(dim=1, keepdim=True).expand_as(log_ratio)
    return values.sum(dim=1, keepdim=True).expand_as(log_ratio)


def per_element(log_ratio: Tensor, settings: Correction, num_elements: int) -> Tensor:
    """Return L itself for log_ratio `sum`, L / D for `mean`."""
    if num_elements < 1:
        raise ValueError(f"num_elements must be >= 1, got {num_elements}")
    return log_ratio / num_elements if settings.log_ratio == "mean" else log_ratio
