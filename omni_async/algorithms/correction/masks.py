"""Defines rules that leave rows out of the loss.

Each takes (N, W) float64 and returns (N, W) bool, True where the row is kept.

k1, k2, k3 are three estimators of KL(b || p) from one sample of b (Schulman, "Approximating KL divergence"), -L, L^2 /
2 and exp(L) - 1 - L, used as rejection statistics by VeRL. kappa is the KL itself, known in closed form for Gaussians;
unlike L it does not depend on the noise that was drawn, so it rejects real drift and not bad luck. M2PO (arXiv
2510.01161) bounds the second moment of L over a batch.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Level = Literal["step", "sum", "mean", "max"]


def k1_mask(log_ratio: Tensor, band: tuple[float, float], level: Level) -> Tensor:
    """Keep rows where the ratio exp(L) lies in band = [lo, hi], both ends included.

    A symmetric bound t is (1 / t, t). (VeRL bounds b / p instead, so its lo_hi is (1 / hi, 1 / lo) here.)

    `sum` and `mean`: the ratio of the sample and its geometric mean over steps. `max`: all steps must lie in the band;
    the maximum of a signed quantity would test one side alone."""
    low, high = math.log(band[0]), math.log(band[1])
    if level == "max":
        smallest, largest = log_ratio.amin(dim=1, keepdim=True), log_ratio.amax(dim=1, keepdim=True)
        return ((smallest >= low) & (largest <= high)).expand_as(log_ratio)
    value = _over_steps(log_ratio, level)
    return ((value >= low) & (value <= high)).expand_as(log_ratio)


def k2_mask(log_ratio: Tensor, bound: float, level: Level) -> Tensor:
    """Keep rows where L^2 / 2 <= bound, per step or aggregated over a sample's steps."""
    return (_over_steps(log_ratio.square() / 2, level) <= bound).expand_as(log_ratio)


def k3_mask(log_ratio: Tensor, bound: float, level: Level) -> Tensor:
    """Keep rows where exp(L) - 1 - L <= bound, per step or aggregated over a sample's steps."""
    return (_over_steps(log_ratio.expm1() - log_ratio, level) <= bound).expand_as(log_ratio)


def kappa_mask(kappa: Tensor, bound: float) -> Tensor:
    """Keep rows where D kappa <= bound, in nats."""
    return kappa <= bound


def m2po_mask(log_ratio: Tensor, bound: float) -> Tensor:
    """Leave out the largest L^2, one by one, until the mean of the others is < bound.

    The most rows that can be kept under it.

    The mean is a batch statistic over all N W rows. Among equal L^2 the rows that come first (sample-major) stay. If
    even the smallest L^2 is >= bound nothing is kept."""
    squares = log_ratio.square().flatten()
    ascending, order = squares.sort(stable=True)
    means = ascending.cumsum(dim=0) / torch.arange(1, len(squares) + 1, dtype=squares.dtype, device=squares.device)
    below = (means < bound).nonzero()
    count = int(below[-1]) + 1 if len(below) else 0
    keep = torch.zeros_like(squares, dtype=torch.bool)
    keep[order[:count]] = True
    return keep.reshape(log_ratio.shape)


def _over_steps(statistic: Tensor, level: Level) -> Tensor:
    """Return (N, W) for `step`, else (N, 1)."""
    if level == "step":
        return statistic
    if level == "sum":
        return statistic.sum(dim=1, keepdim=True)
    if level == "mean":
        return statistic.mean(dim=1, keepdim=True)
    if level == "max":
        return statistic.amax(dim=1, keepdim=True)
    raise ValueError(f"level must be 'step', 'sum', 'mean' or 'max', got {level!r}")
