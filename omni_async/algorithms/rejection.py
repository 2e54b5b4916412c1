"""Rules that leave rows out of the loss, from the log-ratios L of N samples x W trained steps.

k1, k2, k3 are three estimators of KL(b || p) from one sample of b (Schulman, "Approximating KL divergence"): -L,
L^2 / 2 and exp(L) - 1 - L. VeRL uses them as rejection statistics. M2PO (arXiv 2510.01161) bounds the second moment of
L over a batch. `valid` (N, W) bool is False in padded places, which no rule reads; None: there are none.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from omni_async.config.algorithm import RejectLevel


def k1_mask(
    log_ratio: Tensor, band: tuple[float, float], level: RejectLevel, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (N, W) bool, True for rows to keep, whose ratio exp(L) is inside the band; and exp(|L|) (N, W).

    Args:
        log_ratio: L (N, W).
        band: (lo, hi), both ends included. A symmetric bound t is (1 / t, t). (VeRL bounds b / p instead, so its lo_hi
            is (1 / hi, 1 / lo) here.)
        level: `step`: each row's own ratio. `sum` and `mean`: the sample's ratio and its geometric mean over steps.
            `max`: all steps must be inside the band; the maximum of a signed quantity would test only one side.
        valid: as above."""
    low, high = math.log(band[0]), math.log(band[1])
    if level == "max":
        smallest, largest = -_over_steps(-log_ratio, level, valid), _over_steps(log_ratio, level, valid)
    else:
        smallest = largest = _over_steps(log_ratio, level, valid)
    keep = (smallest >= low) & (largest <= high)
    return keep.expand_as(log_ratio), torch.maximum(largest, -smallest).exp().expand_as(log_ratio)


def statistic_mask(
    statistic: Tensor, bound: float, level: RejectLevel, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (N, W) bool, True for rows to keep, whose statistic is at most the bound; and the statistic (N, W).

    Args:
        statistic: (N, W), of each step: L^2 / 2 for k2, exp(L) - 1 - L for k3.
        bound: >= 0.
        level: the aggregation over a sample's steps; `step`: none.
        valid: as above."""
    value = _over_steps(statistic, level, valid).expand_as(statistic)
    return value <= bound, value


def m2po_mask(log_ratio: Tensor, bound: float, valid: Tensor | None = None) -> Tensor:
    """Leave out the largest L^2, one by one and as few as possible, until the mean of the others is < bound.

    The mean is a batch statistic over all rows. Among equal L^2 the first rows (sample-major) stay. If even the
    smallest L^2 is >= bound, no row is kept."""
    squares = (log_ratio if valid is None else log_ratio[valid]).square().flatten()
    ascending, order = squares.sort(stable=True)
    means = ascending.cumsum(dim=0) / torch.arange(1, len(squares) + 1, dtype=squares.dtype, device=squares.device)
    below = (means < bound).nonzero()
    count = int(below[-1]) + 1 if len(below) else 0
    keep = torch.zeros_like(squares, dtype=torch.bool)
    keep[order[:count]] = True
    return keep.reshape(log_ratio.shape) if valid is None else torch.zeros_like(valid).masked_scatter(valid, keep)


def _over_steps(statistic: Tensor, level: RejectLevel, valid: Tensor | None) -> Tensor:
    """Return (N, W) for `step`, else (N, 1)."""
    if level == "step":
        return statistic
    if level == "max":
        return _filled(statistic, valid, -math.inf).amax(dim=1, keepdim=True)
    if level == "sum":
        return _filled(statistic, valid, 0.0).sum(dim=1, keepdim=True)
    if level == "mean":
        if valid is None:
            return statistic.mean(dim=1, keepdim=True)
        return _filled(statistic, valid, 0.0).sum(dim=1, keepdim=True) / valid.sum(dim=1, keepdim=True)
    raise ValueError(f"level must be 'step', 'sum', 'mean' or 'max', got {level!r}")


def _filled(statistic: Tensor, valid: Tensor | None, padding: float) -> Tensor:
    return statistic if valid is None else torch.where(valid, statistic, padding)
