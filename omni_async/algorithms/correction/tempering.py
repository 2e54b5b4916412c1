"""Tempers importance weights exp(gamma L).

Finds the exponent gamma in (0, 1] that leaves a wanted effective sample size.

gamma = 1 is the exact weight, whose effective sample size exp(-2 D kappa) vanishes after a few updates; gamma -> 0 is
no correction. Between them the bias goes to 0 with the drift (gamma -> 1) while the variance stays bounded.

ESS(gamma) never rises: with E_g the mean under weights proportional to exp(g L), d/dgamma ln ESS = 2 (E_gamma[L] -
E_2gamma[L]), and E_g[L] rises with g, its derivative being the variance of L under those weights. So one gamma
separates enough from too little.
"""

from __future__ import annotations

from torch import Tensor

from omni_async.algorithms.correction.drift import effective_sample_size

_RELATIVE_TOLERANCE = 1e-9


def tempering_exponent(log_ratio: Tensor, ess_target: float) -> float:
    """Return the largest gamma in (0, 1] with ESS(exp(gamma L)) >= ess_target on exactly these L.

    It is found to a relative 1e-9, from below.

    `log_ratio` has any shape and finite entries, which all count alike. 0 < ess_target < 1."""
    if not 0 < ess_target < 1:
        raise ValueError(f"ess_target must lie in (0, 1), got {ess_target}")
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
