"""Implements GRPO-Guard (arXiv 2510.22319).

Log-ratios centred and brought to one width at every step, so that the clip binds on both sides alike.

With x' = old mean + S eps and drift d = (mean - old_mean) / S, the log-ratio per element is <d eps> - <d^2> / 2. The
bias adds the second term back, which leaves an expectation of zero under the old policy; the factor S removes the 1 / S
in the first.
"""

from __future__ import annotations

import torch

from omni_async.algorithms.objectives.base import ObjectiveOutput, TransitionInputs
from omni_async.algorithms.objectives.surrogate import (
    clipped_surrogate,
    log_ratios,
    mean_square_difference,
    objective_output,
)
from omni_async.config.algorithm import Algorithm


def grpo_guard(inputs: TransitionInputs, algorithm: Algorithm) -> ObjectiveOutput:
    """Compute per row w max(-A r, -A clip(r, 1 - c, 1 + c)) / h + kl_coef KL.

    r = exp((log_prob - old_log_prob + bias) S).

    bias = <(mean - old_mean)^2> / (2 S^2), each row's own, carries the gradient. sqrt(h) = scale / std. guard.scale
    "sample": S = scale and h are the row's own (Flow-Factory). "batch": S = mean(sqrt(h)) mean(std) and h =
    mean(sqrt(h))^2 over the rows given (VeRL-Omni), so that rows of different steps in one micro-batch share both, and
    micro-batches of several steps must be composed with that in mind. guard.divide false: no division by h. c, w, KL as
    in `flow_grpo`; c is compared with a log-ratio S times as wide as there, so it cannot be given in nats.

    ValueError for a kind other than "flow", the only one whose scale is std sqrt(h); without old_mean; for
    clip_range_nats; for kl_coef > 0 without ref_mean.

    Metrics: those of `flow_grpo`, ratio_deviation and clipped_* of the r above, approx_kl of the log-ratio as it was;
    guard_bias."""
    if inputs.kind != "flow":
        raise ValueError(
            "grpo_guard rescales ratios by std sqrt(step size), the noise scale of kind 'flow' alone; got"
            f" {inputs.kind!r}"
        )
    if inputs.old_mean is None:
        raise ValueError("grpo_guard needs old_mean, the means of the policy that old_log_prob belongs to; got None")
    std = inputs.std.detach().to(torch.float64)
    root_h = inputs.scale.detach().to(torch.float64) / std
    if algorithm.guard.scale == "batch":
        std, root_h = std.mean(), root_h.mean()
    width = root_h * std
    bias = mean_square_difference(inputs.mean, inputs.old_mean) / (2 * width.square())
    loss, metrics = clipped_surrogate(inputs, algorithm, (log_ratios(inputs) + bias) * width, nats=None)
    if algorithm.guard.divide:
        loss = loss / root_h.square()
    return objective_output(inputs, algorithm, loss, {**metrics, "guard_bias": bias})
