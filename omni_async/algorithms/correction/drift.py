"""Measures how far the proximal policy is from the one that made the samples, row by row.

N samples x W trained steps; b is the behaviour policy (the engine's weights and kernels when the step was taken), p the
proximal one (the trainer's weights at the start of the update). Each step is a Gaussian given its input, so a step's
log-ratio needs only the log-prob recorded when it was taken, even where the engine's weights changed in mid-trajectory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Drift:
    """The drift of N samples x W trained steps.

    `log_ratio` (N, W) float64: L = log p(x' | x) - log b(x' | x) of the whole sample in nats (`nats_per_log_prob` of
    `omni_async.sde` converts mean log-probs). `kappa` (N, W) float64: D kappa, the exact Gaussian KL of the step in
    nats, where the behaviour means are known.

    Under b with equal variances L ~ N(-D kappa, 2 D kappa), so D kappa is the drift without the luck of the noise. Mode
    `bypass` has no proximal policy: there L is the log-ratio of the policy in training. ValueError for other shapes or
    dtypes, values that are not finite, kappa < 0 and tensors with a gradient: a correction is data."""

    log_ratio: Tensor
    kappa: Tensor | None = None

    def __post_init__(self) -> None:
        if self.log_ratio.ndim != 2 or self.log_ratio.numel() == 0:
            raise ValueError(f"log_ratio must have shape (N, W) with N, W >= 1, got {tuple(self.log_ratio.shape)}")
        for name, value in (("log_ratio", self.log_ratio), ("kappa", self.kappa)):
            if value is None:
                continue
            if value.shape != self.log_ratio.shape or value.dtype != torch.float64:
                raise ValueError(
                    f"{name} must be float64 of shape {tuple(self.log_ratio.shape)}, got {value.dtype} of shape"
                    f" {tuple(value.shape)}"
                )
            if value.requires_grad:
                raise ValueError(f"{name} requires a gradient, but a correction is data: detach it")
            good = value.isfinite() & (value >= 0) if name == "kappa" else value.isfinite()
            if not good.all():
                sample, step = good.logical_not().nonzero()[0].tolist()
                wanted = "finite and >= 0" if name == "kappa" else "finite"
                raise ValueError(
                    f"{name} must be {wanted}, got {value[sample, step].item()} in sample {sample}, step {step}"
                )


def effective_sample_size(log_weights: Tensor) -> Tensor:
    """Return (mean w)^2 / mean w^2 over the first dimension, w = exp(log_weights).

    (N, ...) to (...), a fraction of N in (0, 1].

    The result is exact, and computed relative to the largest weight, so that weights may be beyond the range of exp.
    -inf is a weight of 0; all of them 0 give 0."""
    values = log_weights.to(torch.float64)
    top = values.amax(dim=0)
    weights = (values - top).exp()
    return torch.where(
        top == -math.inf, 0.0, (weights.mean(dim=0).square() / weights.square().mean(dim=0)).clamp(max=1.0)
    )
