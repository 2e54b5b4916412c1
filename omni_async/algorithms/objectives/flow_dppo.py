"""Implements Flow-DPPO (arXiv 2606.11025): no ratio is clipped.

A row is dropped where its Gaussian has drifted too far and would drift on.

The drift is the KL between the two Gaussians, which has no sampling noise, while a ratio is also large or small by luck
of the noise.
"""

from __future__ import annotations

import torch

from omni_async.algorithms.objectives.base import ObjectiveOutput, TransitionInputs
from omni_async.algorithms.objectives.surrogate import log_ratios, mean_square_difference, objective_output
from omni_async.config.algorithm import Algorithm


def flow_dppo(inputs: TransitionInputs, algorithm: Algorithm) -> ObjectiveOutput:
    """Compute per row -w A r + kl_coef KL, with r = exp(log_prob - old_log_prob).

    In a dropped row the first term is 0, and the row still counts.

    A row is dropped where kappa >= kappa_max and (A > 0 and r > 1, or A < 0 and r < 1). kappa = <(mean - old_mean)^2> /
    (2 s^2) is per latent element, with s = scale (dppo.width "transition", the exact KL of any kind) or s = 1 ("unit");
    dppo.kappa_max_nats is compared with D kappa (nats with "transition" alone) and wins over dppo.kappa_max. The clip
    range is ignored, and A is taken as given. w, KL as in `flow_grpo`.

    ValueError without old_mean, and for kl_coef > 0 without ref_mean. Metrics: ratio_deviation |r - 1|; dropped, 1 or
    0; approx_kl (log r)^2 / 2; with ref_mean kl_ref."""
    if inputs.old_mean is None:
        raise ValueError("flow_dppo needs old_mean, the means of the policy that old_log_prob belongs to; got None")
    settings = algorithm.dppo
    limit = settings.kappa_max if settings.kappa_max_nats is None else settings.kappa_max_nats / inputs.num_elements
    kappa = mean_square_difference(inputs.mean.detach(), inputs.old_mean) / 2
    if settings.width == "transition":
        kappa = kappa / inputs.scale.detach().to(torch.float64).square()
    advantage = inputs.advantage.detach().to(torch.float64)
    log_ratio = log_ratios(inputs)
    dropped = (kappa >= limit) & (advantage * log_ratio.detach().sign() > 0)
    loss = torch.where(dropped, 0.0, -advantage * log_ratio.exp())
    metrics = {"ratio_deviation": log_ratio.expm1().abs(), "dropped": dropped.to(torch.float64)}
    return objective_output(inputs, algorithm, loss, metrics)
