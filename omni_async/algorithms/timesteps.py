"""How many of a sample's denoising steps are trained. Imports no torch."""

from __future__ import annotations


def num_trained(window: int, fraction: float) -> int:
    """Trained steps of a window of `window`: `algorithm.timestep_fraction` of them, rounded down, at least one."""
    return max(1, int(window * fraction + 1e-9))  # 0.7 * 10 is a hair below 7
