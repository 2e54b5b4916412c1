"""Implements DanceGRPO (arXiv 2505.07818): PPO's clipped surrogate per denoising step and nothing else.

Its own part is the transition "dance"."""

from __future__ import annotations

from omni_async.algorithms.objectives.base import ObjectiveOutput, TransitionInputs
from omni_async.algorithms.objectives.flow_grpo import flow_grpo
from omni_async.config.algorithm import Algorithm


def dance_grpo(inputs: TransitionInputs, algorithm: Algorithm) -> ObjectiveOutput:
    """Compute per row w max(-A r, -A clip(r, 1 - c, 1 + c)) with r, c, w as in `flow_grpo`, for any transition kind.

    ValueError for kl_coef > 0: there is no KL in DanceGRPO. Metrics as `flow_grpo`."""
    if algorithm.kl_coef > 0:
        raise ValueError(
            f"algorithm.kl_coef: dance_grpo has no KL term, got {algorithm.kl_coef}; flow_grpo is the same loss"
            " with one"
        )
    return flow_grpo(inputs, algorithm)
