"""Provides the parts that policy-gradient objectives share.

Log-ratios, PPO's clipped surrogate (arXiv 1707.06347, eq. 7), the KL to the reference, and the metrics of both.

Everything per row is float64: clip ranges are often 1e-5 or less, where float32 next to 1 has only about a hundred
values left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from omni_async.algorithms.objectives.base import ObjectiveOutput, TransitionInputs
from omni_async.config.algorithm import Algorithm

Metrics = dict[str, Tensor]

_PUBLISHED_CLIP_RANGE = 1e-4  # flow_grpo, VeRL-Omni


def log_ratios(inputs: TransitionInputs) -> Tensor:
    """Return (R,) float64 with gradient: log_prob - old_log_prob, the log-ratio per latent element.

    Its exponential is the D-th root of the ratio of densities, as in the public code of flow_grpo, VeRL-Omni and
    DanceGRPO; hence clip ranges of order 1 / D. For kind "cps" it is no ratio of densities at all, since the log-prob
    lacks the factor 1 / (2 scale^2)."""
    return inputs.log_prob.to(torch.float64) - inputs.old_log_prob.detach().to(torch.float64)


def log_ratios_nats(inputs: TransitionInputs) -> Tensor:
    """Return (R,) float64 without gradient.

    L, the log-ratio of the whole sample in nats, a ratio of densities for every kind."""
    return inputs.nats_per_log_prob.detach().to(torch.float64) * log_ratios(inputs).detach()


def mean_square_difference(mean: Tensor, other: Tensor) -> Tensor:
    """Return (R,) float64: <(mean - other)^2> of two (R, ...), averaged over all latent dimensions.

    No gradient flows into `other`."""
    return (mean - other.detach()).square().flatten(1).mean(dim=1, dtype=torch.float64)


def clipped_surrogate(
    inputs: TransitionInputs, algorithm: Algorithm, log_ratio: Tensor, nats: Tensor | None
) -> tuple[Tensor, Metrics]:
    """Return per row max(-A r, -A clip(r)) with r = exp(log_ratio), and the metrics of r. All (R,) float64.

    With clip_range c (1e-4 if neither is given) the clip is to [1 - c, 1 + c]. With clip_range_nats c it is to where
    |nats| = c, `nats` being the log-ratio of the whole sample that belongs to log_ratio: a row outside gets log_ratio
    scaled back by c / |nats|, and it has no gradient if A pushes it further out. `nats` is None where log_ratio has no
    such meaning: then clip_range_nats is a ValueError.

    Metrics: ratio_deviation |r - 1|; clipped_low, clipped_high: 1 where r is outside, whether or not the clip takes the
    gradient, as in flow_grpo."""
    advantage = inputs.advantage.detach().to(torch.float64)
    ratio = log_ratio.exp()
    if algorithm.clip_range_nats is None:
        clip = _PUBLISHED_CLIP_RANGE if algorithm.clip_range is None else algorithm.clip_range
        low, high = ratio < 1 - clip, ratio > 1 + clip
        bound = ratio.detach().clamp(1 - clip, 1 + clip)
    else:
        low, high, bound = _clip_in_nats(algorithm, algorithm.clip_range_nats, log_ratio.detach(), nats)
    held = (high & (advantage > 0)) | (low & (advantage < 0))
    loss = -advantage * torch.where(held, bound, ratio)
    return loss, {
        "ratio_deviation": log_ratio.expm1().abs(),
        "clipped_low": low.to(torch.float64),
        "clipped_high": high.to(torch.float64),
    }


def _clip_in_nats(
    algorithm: Algorithm, clip: float, log_ratio: Tensor, nats: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows below and above the clip range in nats, and the ratios that clipped rows get."""
    if algorithm.clip_range is not None:
        raise ValueError(f"give clip_range or clip_range_nats, not both (got {algorithm.clip_range} and {clip})")
    if nats is None:
        raise ValueError(
            f"algorithm.clip_range_nats: the ratio of {algorithm.name} is rescaled, so no bound on it is one in nats;"
            " use clip_range"
        )
    return nats < -clip, nats > clip, (log_ratio * (clip / nats.abs().clamp(min=clip))).exp()


def reference_kl(inputs: TransitionInputs, ref_mean: Tensor, algorithm: Algorithm) -> Tensor:
    """Return (R,) float64, per latent element, with gradient: <(mean - ref_mean)^2> / (2 s^2).

    kl_form "published": s = std, as flow_grpo and VeRL-Omni compute it; "exact": s = scale, the KL between the two
    Gaussians. For kind "flow" the published value is the exact one times the step size; for "dance" and "cps" they
    agree. "mean": <(mean - ref_mean)^2> and no divisor (Flow-Factory's x-space form)."""
    square = mean_square_difference(inputs.mean, ref_mean)
    if algorithm.kl_form == "mean":
        return square
    width = inputs.std if algorithm.kl_form == "published" else inputs.scale
    return square / (2 * width.detach().to(torch.float64).square())


def objective_output(
    inputs: TransitionInputs, algorithm: Algorithm, policy_loss: Tensor, metrics: Metrics, penalty: Tensor | None = None
) -> ObjectiveOutput:
    """Compute weight policy_loss + kl_coef KL + penalty per row, from (R,) float64 parts, in log_prob's dtype.

    Only policy_loss is weighted.

    Adds the metrics approx_kl = log_ratios^2 / 2 and, with ref_mean, kl_ref in the form of `kl_form`. ValueError where
    kl_coef > 0 and there is no ref_mean."""
    loss = policy_loss if inputs.weight is None else inputs.weight.detach().to(torch.float64) * policy_loss
    if penalty is not None:
        loss = loss + penalty
    metrics = {**metrics, "approx_kl": 0.5 * log_ratios(inputs).square()}
    if inputs.ref_mean is not None:
        metrics["kl_ref"] = reference_kl(inputs, inputs.ref_mean, algorithm)
        if algorithm.kl_coef > 0:
            loss = loss + algorithm.kl_coef * metrics["kl_ref"]
    elif algorithm.kl_coef > 0:
        raise ValueError(f"algorithm.kl_coef is {algorithm.kl_coef} but there is no ref_mean to compute the KL to")
    dtype = inputs.log_prob.dtype
    return ObjectiveOutput(loss.to(dtype), {name: value.detach().to(dtype) for name, value in metrics.items()})
