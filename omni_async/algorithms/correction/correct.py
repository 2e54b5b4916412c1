"""Derives from drift what the loss needs.

A weight per row, the rows that are left, and how the loss is averaged over them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from omni_async.algorithms.correction.drift import Drift
from omni_async.algorithms.correction.masks import k1_mask, k2_mask, k3_mask, kappa_mask, m2po_mask
from omni_async.algorithms.correction.validation import problems
from omni_async.algorithms.correction.weights import importance_weights, per_element
from omni_async.config.algorithm import Correction


@dataclass(frozen=True)
class Corrected:
    """The correction of N samples x W trained steps.

    `weight` (N, W) float64, 0 where masked; `unmasked` (N, W) the same before masks, 0 outside `band` alone. `kept` (N,
    W) bool. `masked`: rule (the name of its setting) to (N, W) bool, True where that rule alone masks, for every rule
    that is on. `gamma`: the tempering exponent, 1 without tempering."""

    weight: Tensor
    unmasked: Tensor
    kept: Tensor
    masked: dict[str, Tensor]
    gamma: float


def correct(drift: Drift, settings: Correction, num_elements: int) -> Corrected:
    """Return the settings' weights and masks of these rows; nothing is corrected in mode `none`.

    The rows must be a whole update where `settings.needs_update` says so.

    Rules do not see each other: each judges all rows, and a row stays if every rule keeps it. Weights that `band` sets
    to 0 are masked. Tempering comes after the rules: rows that they leave out do not affect its exponent. k1, k2, k3
    and m2 read the same L as the weights: per latent element with log_ratio `mean`; kappa_nats is in nats always.
    ValueError for settings that `problems` objects to, and for kappa_nats without drift.kappa."""
    for problem in problems(settings):
        raise ValueError(problem)
    log_ratio = per_element(drift.log_ratio, settings, num_elements)
    level = settings.reject_level
    keep: dict[str, Tensor] = {}
    if settings.kappa_nats is not None:
        if drift.kappa is None:
            raise ValueError(
                "algorithm.correction.kappa_nats needs drift.kappa, which takes the behaviour policy's means; there are"
                " none"
            )
        keep["kappa_nats"] = kappa_mask(drift.kappa, settings.kappa_nats)
    if settings.m2 is not None:
        keep["m2"] = m2po_mask(log_ratio, settings.m2)
    if settings.k1 is not None:
        keep["k1"] = k1_mask(log_ratio, settings.k1, level)
    if settings.k2 is not None:
        keep["k2"] = k2_mask(log_ratio, settings.k2, level)
    if settings.k3 is not None:
        keep["k3"] = k3_mask(log_ratio, settings.k3, level)
    kept = torch.ones_like(log_ratio, dtype=torch.bool)
    for own in keep.values():
        kept = kept & own
    weight, gamma = importance_weights(drift.log_ratio, settings, num_elements, kept)
    if settings.band is not None:
        keep["band"] = weight > 0
        kept = kept & keep["band"]
    return Corrected(torch.where(kept, weight, 0.0), weight, kept, {name: ~own for name, own in keep.items()}, gamma)


def normaliser(corrected: Corrected, settings: Correction) -> tuple[float, float]:
    """Return (numerator, denominator).

    The mean over all rows of weight x loss is to be multiplied by numerator / denominator (`loss_factor`).

    Both are sums over rows, so those of micro-batches add up to those of the update. The numerator is the number of
    rows. The denominator counts the rows that are left (`kept`) or all of them (`all`), each as 1, or as its weight
    where weights are normalised: the loss is the sum of weight x loss over the rows that are left, divided by the
    denominator. So with `all` a masked row dilutes the loss by what it would have weighed (VeRL's batch normalisation,
    which knows no masks)."""
    rows = float(corrected.weight.numel())
    if settings.normalises:
        return rows, (corrected.weight if settings.denominator == "kept" else corrected.unmasked).sum().item()
    return rows, float(corrected.kept.sum().item()) if settings.denominator == "kept" else rows


def loss_factor(numerator: float, denominator: float) -> float:
    """Return numerator / denominator, and 0 where the denominator is 0.

    With every row masked there is nothing to learn from, and no gradient."""
    return numerator / denominator if denominator > 0 else 0.0
