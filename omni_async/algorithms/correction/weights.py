"""Importance weights w = p / b from log-ratios: exact or tempered, truncated, or 0 outside a band.

Whole-sample log-ratios (`sum`) make exact weights. The mean over D latent elements (`mean`, published code) makes their D-th root, which
differs from 1 by about 1e-5 at image sizes and corrects nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from omni_async.algorithms.correction.tempering import tempering_exponent
from omni_async.config.algorithm import Correction

MAX_EXPONENT = 20.0


def importance_weights(log_ratio: Tensor, settings: Correction, num_elements: int) -> tuple[Tensor, float]:
    """(weights (N, W) float64, gamma) of L = `log_ratio` (N, W) in nats; w = exp(clamp(gamma e, +-20)).

    The exponent e is L for level `step` and the sum of L over the sample's steps for `trajectory`, where all steps share the weight;
    with log_ratio `mean` it is L / D, and the mean of that over the steps. gamma is 1 unless weights are `tempered`: then the
    `tempering_exponent` of all rows (or samples) given, so give a whole update. First weights outside `band` become 0 (IcePop), then the
    others are truncated at `cap`. `weights: none` gives ones.

    Clamping and truncating keep the order of weights and shrink large ones most, which cannot lower the effective sample size.
    """
    if settings.weights == "none":
        return torch.ones_like(log_ratio), 1.0
    values = per_element(log_ratio, settings, num_elements)
    if settings.level == "trajectory":
        values = values.mean(dim=1, keepdim=True) if settings.log_ratio == "mean" else values.sum(dim=1, keepdim=True)
    gamma = tempering_exponent(values, settings.ess_target) if settings.weights == "tempered" else 1.0
    weight = (gamma * values).clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()
    if settings.band is not None:
        low, high = settings.band
        weight = torch.where((weight >= low) & (weight <= high), weight, 0.0)
    if settings.cap is not None:
        weight = weight.clamp(max=settings.cap)
    return weight.expand_as(log_ratio), gamma


def per_element(log_ratio: Tensor, settings: Correction, num_elements: int) -> Tensor:
    """L itself for log_ratio `sum`, L / D for `mean`."""
    if num_elements < 1:
        raise ValueError(f"num_elements must be >= 1, got {num_elements}")
    return log_ratio / num_elements if settings.log_ratio == "mean" else log_ratio
