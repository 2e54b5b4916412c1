"""Counts the rows a sample is trained on: denoising steps, or noise draws of its final latents. Imports no torch."""

from __future__ import annotations

from omni_async.config.algorithm import Forward


def num_trained(window: int, fraction: float) -> int:
    """Return the number of trained steps of a window of `window`.

    `algorithm.timestep_fraction` of them, rounded down, at least one."""
    return max(1, int(window * fraction + 1e-9))  # 0.7 * 10 is a hair below 7


def num_draws(num_inference_steps: int, forward: Forward, timestep_fraction: float) -> int:
    """Return the number K of noise draws of a sample of `num_inference_steps` N.

    `forward.draws`, or else timestep_fraction of the sigmas to draw from, rounded down but at least 1. There are N of
    them, and N - 1 for `schedule_wo_first`, where N = 1 is a ValueError."""
    if num_inference_steps < 1:
        raise ValueError(f"num_inference_steps must be >= 1, got {num_inference_steps}")
    choices = num_inference_steps - (forward.sigmas == "schedule_wo_first")
    if choices == 0:
        raise ValueError("forward.sigmas: schedule_wo_first leaves nothing of a schedule of 1 step")
    return forward.draws or num_trained(choices, timestep_fraction)
