"""Plots a run's learning: the reward of its updates, and of its validation rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omni_async.config.writing import replacing
from omni_async.records.read.rounds import read_rounds

# Okabe and Ito's colours, distinguishable for colour-blind readers.
_UPDATES, _ROUNDS, _CHOSEN = "#0072B2", "#D55E00", "#009E73"
_LARGEST = 1e100  # an edited file may hold any number, and axes fail if squares overflow


def plot_curves(
    path: Path, updates: Sequence[Mapping[str, Any]], rounds: Sequence[Mapping[str, Any]], version: int
) -> bool:
    """Write the picture. Return False if there is nothing to plot, or no matplotlib (the extra `plots`).

    Args:
        path: the PNG file.
        updates, rounds: lines of metrics.jsonl.
        version: the exported version, which is marked."""
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    lines = [("training", "reward", updates, _UPDATES, "."), ("validation", "validation/reward", rounds, _ROUNDS, "o")]
    figure = Figure(figsize=(7.0, 3.6), layout="constrained")
    axes = figure.subplots()
    drawn = False
    for label, key, records, color, marker in lines:
        found = [(one["update"], one[key]) for one in records if _is_drawn(one.get(key))]
        if found:
            axes.plot(*zip(*sorted(found), strict=True), color=color, marker=marker, label=label, linewidth=1.2)
            drawn = True
    left_out = {one.version: one.reward for one in read_rounds(rounds) if one.reward is not None and one.is_incomplete}
    if left_out:
        at, means = [*left_out], [*left_out.values()]
        axes.plot(at, means, color=_ROUNDS, marker="x", markersize=10, linestyle="", label="not all samples scored")
    if not drawn:
        return False
    axes.axvline(version, color=_CHOSEN, linestyle="--", linewidth=1.0, label=f"exported: update {version}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("update")
    axes.set_ylabel("mean reward")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    with replacing(path) as unfinished:
        figure.savefig(unfinished, dpi=120)
    return True


def _is_drawn(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST
