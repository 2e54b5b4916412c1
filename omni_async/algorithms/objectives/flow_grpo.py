"""Implements Flow-GRPO (arXiv 2505.05470).

PPO's clipped surrogate per denoising step, and a KL to the reference policy."""

from __future__ import annotations

from omni_async.algorithms.objectives.base import ObjectiveOutput, TransitionInputs
from omni_async.algorithms.objectives.surrogate import clipped_surrogate, log_ratios, log_ratios_nats, objective_output
from omni_async.config.algorithm import Algorithm


def flow_grpo(inputs: TransitionInputs, algorithm: Algorithm) -> ObjectiveOutput:
    """Compute per row w max(-A r, -A clip(r, 1 - c, 1 + c)) + kl_coef KL.

    r = exp(log_prob - old_log_prob) is the ratio per latent element.

    c is clip_range; clip_range_nats bounds L = D log r instead (for "cps" D log r / (2 S^2)). w is the weight, 1
    without one. KL: `surrogate.reference_kl`. ValueError where kl_coef > 0 and there is no ref_mean.

    Metrics: ratio_deviation |r - 1|; clipped_low, clipped_high: 1 where r is outside 1 +- c; approx_kl (log r)^2 / 2;
    with ref_mean kl_ref."""
    loss, metrics = clipped_surrogate(inputs, algorithm, log_ratios(inputs), log_ratios_nats(inputs))
    return objective_output(inputs, algorithm, loss, metrics)
