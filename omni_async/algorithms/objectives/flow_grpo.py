"""Flow-GRPO (arXiv 2505.05470), which is also DanceGRPO's objective (arXiv 2505.07818): PPO's clipped surrogate per denoising step."""

from __future__ import annotations

import torch
from torch import Tensor

from omni_async.algorithms.objectives.base import ObjectiveOutput, ObjectiveSettings, StepInputs, resolve_clip_range
from omni_async.algorithms.registry import register_objective

__all__ = ["ObjectiveOutput", "ObjectiveSettings", "StepInputs", "flow_grpo", "resolve_clip_range"]


def _no_kl(settings: ObjectiveSettings) -> bool:
    return settings.kl_coef == 0


@register_objective("flow_grpo", fields=("latents", "log_probs", "conditioning"), homogeneous=_no_kl)
def flow_grpo(inputs: StepInputs, settings: ObjectiveSettings) -> ObjectiveOutput:
    """Per row max(-A r, -A clip(r, 1 - c, 1 + c)) + kl_coef KL, with r = exp(log_prob - old_log_prob).

    r is the ratio per latent element (the D-th root of the sample's ratio), as in the public code of flow_grpo, VeRL-Omni and
    DanceGRPO: so c is of order 1 / D. For kind "cps" r is not a ratio of densities at all, since the reference drops 1 / (2 scale^2).

    KL is <(mean - ref_mean)^2> / (2 s^2), averaged over elements. kl_form "published" takes s = std, as flow_grpo and VeRL-Omni
    compute it; "exact" takes s = scale, the KL between the two Gaussians per element. For kind "flow" the published value is the
    exact one times the step size h; for "dance" and "cps" they agree.

    Metrics: ratio_deviation |r - 1|; clipped_low / clipped_high, 1 where r is outside (whether or not the clip takes the
    gradient, as in flow_grpo); approx_kl (log r)^2 / 2; log_ratio_nats, the whole sample's log-ratio L; with old_mean
    kappa_nats, D <(mean - old_mean)^2> / (2 scale^2), the drift without sampling noise; with ref_mean kl_ref.
    """
    if settings.kl_form not in ("published", "exact"):
        raise ValueError(f"kl_form must be 'published' or 'exact', got {settings.kl_form!r}")
    if settings.kl_coef > 0 and inputs.ref_mean is None:
        raise ValueError(f"kl_coef is {settings.kl_coef} but there is no ref_mean to compute the KL to")
    clip = settings.clip_range
    # clip is often 1e-5 or less, where float32 next to 1 has only about a hundred values left
    log_ratio = inputs.log_prob.to(torch.float64) - inputs.old_log_prob.detach().to(torch.float64)
    ratio = log_ratio.exp()
    advantage = inputs.advantage.detach().to(torch.float64)
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip, 1 + clip))

    drift = log_ratio.detach()
    metrics = {
        "ratio_deviation": drift.expm1().abs(),
        "clipped_low": (ratio.detach() < 1 - clip).to(torch.float64),
        "clipped_high": (ratio.detach() > 1 + clip).to(torch.float64),
        "approx_kl": 0.5 * drift.square(),
        "log_ratio_nats": _nats_per_log_prob(inputs) * drift,
    }
    if inputs.old_mean is not None:
        metrics["kappa_nats"] = inputs.num_elements * _gaussian_kl(inputs.mean.detach(), inputs.old_mean, inputs.scale)
    if inputs.ref_mean is not None:
        width = inputs.std if settings.kl_form == "published" else inputs.scale
        kl = _gaussian_kl(inputs.mean, inputs.ref_mean, width)
        metrics["kl_ref"] = kl.detach()
        if settings.kl_coef > 0:
            loss = loss + settings.kl_coef * kl
    dtype = inputs.log_prob.dtype
    return ObjectiveOutput(loss.to(dtype), {name: value.to(dtype) for name, value in metrics.items()})


def _gaussian_kl(mean: Tensor, other: Tensor, width: Tensor) -> Tensor:
    """(R,) float64: <(mean - other)^2> / (2 width^2), averaged over all latent dimensions."""
    mean_square = (mean - other.detach()).square().flatten(1).mean(dim=1, dtype=torch.float64)
    return mean_square / (2 * width.detach().to(torch.float64).square())


def _nats_per_log_prob(inputs: StepInputs) -> Tensor:
    """(R,) float64: see `omni_async.sde.transitions.nats_per_log_prob` (a sibling that this package does not import)."""
    scale = inputs.scale.detach().to(torch.float64)
    if inputs.kind == "cps":
        return inputs.num_elements / (2 * scale.square())
    return torch.full_like(scale, inputs.num_elements)
