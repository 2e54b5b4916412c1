"""Plots the learning benchmark: reward against wall-clock, and against images, a line per arm with its range over
seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from matplotlib.figure import Figure

_WINDOW = 5
# Okabe and Ito's colours, which colour-blind readers tell apart.
_COLOURS = ("#000000", "#0072B2", "#E69F00", "#009E73", "#CC79A7")


class Curve(msgspec.Struct, frozen=True):
    """The learning curve of one run: seconds since its first sample was asked for, and images generated, when each
    update was done; its mean reward. `validation`: (seconds, images, mean reward), of the versions that were
    validated."""

    arm: str
    seed: int
    seconds: list[float]
    images: list[int]
    rewards: list[float]
    validation: list[tuple[float, int, float]]

    def seconds_to(self, reward: float) -> float | None:
        """Returns when validation reached `reward`, on straight lines between rounds; None if it never did."""
        before: tuple[float, float] | None = None
        for seconds, _, value in self.validation:
            if value >= reward:
                if before is None or value == before[1]:
                    return seconds
                return before[0] + (seconds - before[0]) * (reward - before[1]) / (value - before[1])
            before = seconds, value
        return None


def draw(found: Sequence[Curve], path: Path) -> None:
    picture(found).savefig(path, dpi=130)


def picture(found: Sequence[Curve]) -> Figure:
    """Plots wall-clock on the left, images on the right. Lines: training reward (moving average); diamonds:
    validation, mean over seeds."""
    figure = Figure(figsize=(10.5, 4.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    arms = list(dict.fromkeys(curve.arm for curve in found))
    for axes, measure, label in zip(
        panels, ("seconds", "images"), ("seconds since the first sample", "images generated"), strict=True
    ):
        for arm, colour in zip(arms, _COLOURS * len(arms), strict=False):
            _line(axes, [curve for curve in found if curve.arm == arm], measure, colour, arm)
        axes.set_xlabel(label)
        axes.grid(alpha=0.25)
    panels[0].set_ylabel(f"reward (mean of {_WINDOW} updates; diamonds: validation)")
    panels[0].legend(frameon=False)
    return figure


def _line(axes: Any, curves: Sequence[Curve], measure: str, colour: str, arm: str) -> None:
    """Draws the mean over seeds at each update, at the mean moment, because seeds reach an update at different
    moments."""
    length = min(len(curve.rewards) for curve in curves)
    at = np.mean([getattr(curve, measure)[:length] for curve in curves], axis=0)
    kernel = np.ones(min(_WINDOW, length)) / min(_WINDOW, length)
    rewards = np.array([np.convolve(curve.rewards[:length], kernel, mode="valid") for curve in curves])
    at = at[len(at) - rewards.shape[1] :]
    axes.plot(at, rewards.mean(0), color=colour, label=arm)
    axes.fill_between(at, rewards.min(0), rewards.max(0), color=colour, alpha=0.15, linewidth=0)
    rounds = min(len(curve.validation) for curve in curves)
    column = 0 if measure == "seconds" else 1
    for number in range(rounds):
        points = [curve.validation[number] for curve in curves]
        x, y = np.mean([point[column] for point in points]), np.mean([point[2] for point in points])
        axes.plot([x], [y], marker="D", color=colour, markersize=5, markeredgecolor="white", linestyle="none")
