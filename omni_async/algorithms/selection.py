"""Selects the samples of a group that are trained, and their signs. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence


def best_and_worst(rewards: Sequence[float]) -> tuple[int, int]:
    """Return the positions of the best and the worst reward, the first of each where several are equal.

    Two different samples even if all are.

    ValueError for fewer than two: one sample makes no pair."""
    if len(rewards) < 2:
        raise ValueError(f"a preference pair needs at least 2 samples of a prompt, got {len(rewards)}")
    best = max(range(len(rewards)), key=lambda i: rewards[i])
    worst = min((i for i in range(len(rewards)) if i != best), key=lambda i: rewards[i])
    return best, worst
