"""Plots the staleness experiment: a panel per S, reward against images generated, a line per correction with its
range over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from benchmarks.staleness_plan import CORRECTIONS
from benchmarks.staleness_results import CellResult

Floats = npt.NDArray[np.float64]

WINDOW = 10
# Okabe and Ito's colours, which colour-blind readers tell apart.
_COLOURS = dict(zip(CORRECTIONS, ("#000000", "#E69F00", "#56B4E9", "#009E73"), strict=True))


def draw(results: Sequence[CellResult], path: Path) -> None:
    picture(results).savefig(path, dpi=130)


def picture(results: Sequence[CellResult]) -> Figure:
    """Plots training reward as a moving average over WINDOW updates; validation rewards (mean over seeds) as
    markers. `results` is not empty."""
    panels = sorted({result.staleness for result in results})
    figure = Figure(figsize=(max(4.2 * len(panels), 8.0), 4.6), layout="constrained")
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    lines: dict[str, Any] = {}
    for axes, staleness in zip(all_axes, panels, strict=True):
        for correction, colour in _COLOURS.items():
            group = [r for r in results if (r.staleness, r.correction) == (staleness, correction)]
            if group:
                lines[correction] = _line(axes, group, colour)
        axes.set_title(f"S = {staleness}")
        axes.set_xlabel("images generated")
        axes.grid(alpha=0.25)
    all_axes[0].set_ylabel(f"reward (mean of {WINDOW} updates; diamonds: validation)")
    shown = [correction for correction in CORRECTIONS if correction in lines]
    figure.legend([lines[c] for c in shown], shown, loc="outside lower center", ncols=len(shown), frameon=False)
    return figure


def _line(axes: Any, group: Sequence[CellResult], colour: str) -> Any:
    images, rewards = curves(group)
    (line,) = axes.plot(images, rewards.mean(0), color=colour)
    axes.fill_between(images, rewards.min(0), rewards.max(0), color=colour, alpha=0.15, linewidth=0)
    for version in sorted({point.version for result in group for point in result.validation}):
        points = [point for result in group for point in result.validation if point.version == version]
        at, value = np.mean([p.images for p in points]), np.mean([p.value for p in points])
        axes.plot([at], [value], marker="D", color=colour, markersize=5, markeredgecolor="white", linestyle="none")
    return line


def curves(group: Sequence[CellResult]) -> tuple[Floats, Floats]:
    """Returns (images (n,), rewards (seeds, n)): the seeds' averaged curves where all of them have one. Seeds reject
    different groups, so the same update has cost each of them a different number of images; between updates lines
    are straight."""
    smooth = [(np.asarray(r.images, np.float64), moving_average(r.rewards, WINDOW)) for r in group]
    first, last = max(x[0] for x, _ in smooth), min(x[-1] for x, _ in smooth)
    grid = np.unique(np.clip(np.concatenate([x for x, _ in smooth]), first, last))
    return grid, np.stack([np.interp(grid, x, y) for x, y in smooth])


def moving_average(values: Sequence[float], window: int) -> Floats:
    """Returns (n,): the mean of each value and up to window - 1 before it."""
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, np.float64))])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    means: Floats = (sums[ends] - sums[starts]) / (ends - starts)
    return means
