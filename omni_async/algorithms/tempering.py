"""Tempers importance weights.

Tempering exp(gamma L) finds the gamma in (0, 1] that gives the target effective sample size. gamma = 1 is the exact
weight, whose effective sample size exp(-2 D kappa) vanishes after a few updates; gamma -> 0 is no correction. Between
them the bias vanishes with the drift (gamma -> 1) while the variance stays bounded. ESS(gamma) never rises: with E_g
the mean under weights proportional to exp(g L), d/dgamma ln ESS = 2 (E_gamma[L] - E_2gamma[L]), and E_g[L] rises with
g, because its derivative is the variance of L under those weights. So a single gamma separates enough from too little.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_RELATIVE_TOLERANCE = 1e-9  # of the exponent


def tempering_exponent(log_ratio: Tensor, ess_target: float) -> float:
    """Return the largest gamma in (0, 1] with ESS(exp(gamma L)) >= ess_target, to a relative 1e-9, from below.

    `log_ratio` has any shape and finite entries, which all count equally. 0 < ess_target < 1."""
    if not 0 < ess_target < 1:
        raise ValueError(f"ess_target must be in (0, 1), got {ess_target}")
    values = log_ratio.flatten()

    def enough(gamma: float) -> bool:
        return effective_sample_size(gamma * values).item() >= ess_target

    if enough(1.0):
        return 1.0
    low, high = 0.0, 1.0
    while low == 0.0 or high - low > _RELATIVE_TOLERANCE * high:
        middle = (low + high) / 2
        low, high = (middle, high) if enough(middle) else (low, middle)
    return low


def effective_sample_size(log_weights: Tensor) -> Tensor:
    """Return (mean w)^2 / mean w^2 over the first dimension, w = exp(log_weights): (N, ...) to (...), in (0, 1].

    Computed relative to the largest weight, so that weights may exceed the range of exp. -inf is a weight of 0; if all
    weights are 0, the result is 0."""
    values = log_weights.to(torch.float64)
    top = values.amax(dim=0)
    weights = (values - top).exp()
    return torch.where(
        top == -math.inf, 0.0, (weights.mean(dim=0).square() / weights.square().mean(dim=0)).clamp(max=1.0)
    )
