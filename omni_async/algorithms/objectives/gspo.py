"""Implements GSPO (arXiv 2507.18071), its sequence being the denoising steps of a sample.

One ratio per sample, the geometric mean over its steps."""

from __future__ import annotations

from torch import Tensor

from omni_async.algorithms.objectives.base import ObjectiveOutput, TransitionInputs
from omni_async.algorithms.objectives.surrogate import clipped_surrogate, log_ratios, log_ratios_nats, objective_output
from omni_async.config.algorithm import Algorithm


def gspo(inputs: TransitionInputs, algorithm: Algorithm) -> ObjectiveOutput:
    """Compute per row w max(-A s, -A clip(s, 1 - c, 1 + c)) + kl_coef KL.

    s = exp(mean of log_prob - old_log_prob over the sample's steps).

    A sample is `steps_per_sample` consecutive rows. They share s, through which every one of them has its gradient, and
    each carries the whole sample's surrogate: the mean over rows is the mean over samples, in value and gradient. A
    row's weight w multiplies its own copy, so a weight per trajectory is that weight on all of the sample's rows. The
    KL is each row's own. KL as in `flow_grpo`. c bounds the average step, clip_range_nats the mean over steps of L.
    GSPO's own c (3e-4) is for tokens: here it is of order 1 / D, as in `flow_grpo`.

    ValueError for kl_coef > 0 without ref_mean. Metrics: those of `flow_grpo`, ratio_deviation and clipped_* of s,
    repeated on the sample's rows; approx_kl of each row's own log-ratio."""
    loss, metrics = clipped_surrogate(
        inputs,
        algorithm,
        _mean_over_steps(inputs, log_ratios(inputs)),
        _mean_over_steps(inputs, log_ratios_nats(inputs)),
    )
    return objective_output(inputs, algorithm, loss, metrics)


def _mean_over_steps(inputs: TransitionInputs, rows: Tensor) -> Tensor:
    """Give every row (R,) the mean over its sample's rows."""
    return rows.unflatten(0, (-1, inputs.steps_per_sample)).mean(dim=1).repeat_interleave(inputs.steps_per_sample)
