"""Plots a search: every simulated point, the front through them, and the chosen point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from omni_async.simulation.tune.keys import S, count
from omni_async.simulation.tune.search import Point
from omni_async.simulation.tune.tuning import Tuned

# Okabe and Ito's palette, which colour-blind readers can distinguish.
_FRONT, _CHOSEN, _RECIPE, _OTHER = "#0072B2", "#D55E00", "#009E73", "#999999"


def picture(tuned: Tuned) -> Figure:
    """Plot samples/s against mean staleness."""
    figure = Figure(figsize=(8.0, 4.8), layout="constrained")
    axes = figure.subplots()
    axes.scatter(*_coordinates(tuned.points), s=16, color=_OTHER, label="simulated")
    axes.plot(*_coordinates(tuned.front), color=_FRONT, marker="o", label="front")
    for point in {count(point.keys, S): point for point in tuned.front}.values():
        (mean,), (rate,) = _coordinates([point])  # the fastest of each S
        place: dict[str, Any] = {"xytext": (4, -12), "textcoords": "offset points"}
        axes.annotate(f"S = {count(point.keys, S)}", (mean, rate), **place, fontsize=8, color=_FRONT)
    axes.plot(
        *_coordinates([tuned.chosen]), color=_CHOSEN, marker="*", markersize=16, linestyle="none", label="recommended"
    )
    if tuned.recipe_devices == tuned.devices:
        axes.plot(*_coordinates([tuned.recipe]), color=_RECIPE, marker="s", linestyle="none", label="recipe as it is")
    axes.set_xlabel("staleness of trained groups, updates (mean; S: the bound)")
    axes.set_ylabel(f"samples/s on {tuned.devices} {tuned.kind}")
    axes.set_title(f"profile {tuned.profile}")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    return figure


def _coordinates(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [point.simulated.staleness_mean for point in points], [point.images_per_s for point in points]
