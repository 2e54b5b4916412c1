"""Implements MixGRPO (arXiv 2507.21802): PPO's clipped surrogate on the steps of a sliding window.

The sampler moves the window."""

from __future__ import annotations

from omni_async.algorithms.objectives.base import ObjectiveOutput, TransitionInputs
from omni_async.algorithms.objectives.surrogate import clipped_surrogate, log_ratios, log_ratios_nats, objective_output
from omni_async.config.algorithm import Algorithm


def mix_grpo(inputs: TransitionInputs, algorithm: Algorithm) -> ObjectiveOutput:
    """Compute per row w max(-A r, -A clip(r, 1 - c, 1 + c)) + mix.log_ratio_coef (log r)^2 / 2 + kl_coef KL.

    r, c, w, KL are as in `flow_grpo`.

    MixGRPO's public code calls the middle term its KL: a pull to the policy of old_log_prob, from the sampled log-ratio
    alone. w does not multiply it. ValueError and metrics as `flow_grpo`; approx_kl is the middle term without its
    coefficient."""
    log_ratio = log_ratios(inputs)
    loss, metrics = clipped_surrogate(inputs, algorithm, log_ratio, log_ratios_nats(inputs))
    coef = algorithm.mix.log_ratio_coef
    return objective_output(inputs, algorithm, loss, metrics, 0.5 * coef * log_ratio.square() if coef > 0 else None)
