"""Detects a vanished gradient: the run continues, its numbers look fine, but it learns nothing any more."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

# Number of updates whose median is compared: a single batch with all pairs satisfied may be chance.
_RECENT = 5
# Relative to the gradient norm at the beginning of the run.
_VANISHED = 1e-3


class GradientWatch:
    """A comparison of the gradient norms of the newest updates with those of the first.

    Warns once, and again only after the norms have recovered."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._warned = False

    def take(self, version: int, metrics: Mapping[str, float]) -> str | None:
        """Add an update; return the warning, a sentence, if this update causes one."""
        if "grad_norm" not in metrics:
            return None
        norm = metrics["grad_norm"]
        if norm > 0 and len(self._first) < _RECENT:
            self._first.append(norm)
        self._recent.append(norm)
        if len(self._recent) < _RECENT:
            return None
        now, then = median(self._recent), median(self._first or [0.0])
        vanished = now <= _VANISHED * then
        warns, self._warned = vanished and not self._warned, vanished
        if not warns:
            return None
        fell = f"{now:.2g}, where it began at {then:.2g}" if then else "0"
        return (
            f"warning: update {version}: the gradient has vanished (median norm of the last {_RECENT} updates {fell}):"
            f" {_cause(metrics)}"
        )


def _cause(metrics: Mapping[str, float]) -> str:
    if {"accuracy", "margin"} <= metrics.keys():
        return (
            f"the preferences are satisfied (accuracy {metrics['accuracy']:.2f}, margin {metrics['margin']:.3g}), so"
            " these pairs teach nothing more; stop here, give other pairs, or lower algorithm.dpo.beta"
        )
    if metrics.get("clip_fraction", 0.0) > 0.5:
        return (
            f"{metrics['clip_fraction']:.0%} of the rows are outside the clip range; a larger algorithm.clip_range or"
            " fresher samples let them count"
        )
    if metrics.get("masked", 0.0) > 0.5:
        return f"the off-policy correction masks {metrics['masked']:.0%} of the rows"
    return (
        "nothing is learned any more; the rewards of a group may hardly differ, or the objective has nothing left to"
        " gain"
    )
