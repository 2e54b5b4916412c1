"""Plots the benchmark: step times and their parts, the load of each role, and the staleness of trained groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from omni_async.commands.bench.comparison import CATEGORIES, ArmSummary, compare
from omni_async.commands.bench.result import Overlap
from omni_async.config.writing import replacing

# Okabe and Ito's colours, distinguishable for colour-blind readers, and two greys.
_COLOURS = {
    "training": "#0072B2",
    "recompute": "#56B4E9",
    "export": "#CC79A7",
    "generation": "#E69F00",
    "tail": "#F0E442",
    "reward": "#009E73",
    "switch": "#D55E00",
    "weights": "#000000",
    "idle": "#BBBBBB",
}
_STATES = {"busy": "#0072B2", "starved": "#E69F00", "backpressured": "#999999"}
_ROLES = ("rollout", "reward", "trainer")
_INCHES_PER_ARM = 0.75
_DPI = 110


def draw(overlap: Overlap, path: Path) -> None:
    """Draw four plots, arms side by side in each. At least one arm must have been measured."""
    with replacing(path) as unfinished:
        figure_of(overlap).savefig(unfinished, dpi=_DPI)


def figure_of(overlap: Overlap) -> Figure:
    arms = list(compare(overlap).values())
    width = max(5.5, 2.0 + _INCHES_PER_ARM * len(arms))
    figure = Figure(figsize=(2 * width, 9.0), layout="constrained")
    panels: tuple[Callable[[Any, list[ArmSummary]], None], ...] = (_step_times, _attribution, _roles, _staleness)
    for axes, panel in zip(figure.subplots(2, 2).flat, panels, strict=True):
        panel(axes, arms)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _name_arms(axes: Any, arms: list[ArmSummary]) -> None:
    axes.set_xticks(range(len(arms)), [arm.name for arm in arms], rotation=30, ha="right")
    axes.set_xlim(-0.6, len(arms) - 0.4)


def _legend_above(axes: Any) -> None:
    """Put the legend in one line under the title, clear of all marks."""
    axes.legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 0.99), borderaxespad=0)


def _step_times(axes: Any, arms: list[ArmSummary]) -> None:
    steps, x = [arm.step_s for arm in arms], range(len(arms))
    errors = [[step.median - step.low for step in steps], [step.high - step.median for step in steps]]
    medians, colour = [step.median for step in steps], _COLOURS["training"]
    axes.errorbar(x, medians, errors, fmt="o", color=colour, capsize=4, label="measured (median, quartiles)")
    if law := [(at, arm.law_s) for at, arm in enumerate(arms) if arm.law_s is not None]:
        at, seconds = zip(*law, strict=True)
        axes.hlines(seconds, [a - 0.3 for a in at], [a + 0.3 for a in at], color="black", label="law")
    if simulated := [(at, arm.simulated_s) for at, arm in enumerate(arms) if arm.simulated_s is not None]:
        colour = _COLOURS["switch"]
        axes.plot(*zip(*simulated, strict=True), "D", fillstyle="none", color=colour, label="simulated")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("seconds per update")
    axes.set_title("Step time", loc="left", pad=22)
    _legend_above(axes)
    _name_arms(axes, arms)


def _stack(axes: Any, x: Sequence[float], parts: Iterable[tuple[str | None, str, list[float]]], width: float) -> None:
    """Draw bars of several parts on top of each other; a part is a label, a colour and a height per bar."""
    bottoms = [0.0] * len(x)
    for label, colour, heights in parts:
        axes.bar(x, heights, bottom=bottoms, color=colour, width=width, label=label)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]


def _attribution(axes: Any, arms: list[ArmSummary]) -> None:
    heights = {category: [arm.attribution[category] for arm in arms] for category in CATEGORIES}
    parts = [(CATEGORIES[name], _COLOURS[name], seconds) for name, seconds in heights.items() if max(seconds) > 0]
    _stack(axes, range(len(arms)), parts, 0.7)
    axes.set_ylabel("seconds per update")
    axes.set_title("Where the trainer's time goes", loc="left")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1), reverse=True)
    _name_arms(axes, arms)


def _roles(axes: Any, arms: list[ArmSummary]) -> None:
    width = 0.8 / len(_ROLES)
    text = {"rotation": 90, "ha": "center", "va": "bottom", "fontsize": 7, "color": "white"}
    outline = [withStroke(linewidth=1.5, foreground="#333333")]
    for number, role in enumerate(_ROLES):
        centres = [x + (number - 1) * width for x in range(len(arms))]
        parts = [
            (None if number else state, colour, [arm.busy.get(role, {}).get(state, 0.0) for arm in arms])
            for state, colour in _STATES.items()
        ]
        _stack(axes, centres, parts, 0.9 * width)
        for centre in centres:
            axes.annotate(role, (centre, 0.02), path_effects=outline, **text)
    axes.set_ylim(0, 1)
    axes.set_ylabel("fraction of the time")
    axes.set_title("What each role does", loc="left", pad=22)
    _legend_above(axes)
    _name_arms(axes, arms)


def _staleness(axes: Any, arms: list[ArmSummary]) -> None:
    oldest = max(arm.staleness_max for arm in arms)
    groups = [max(1, sum(arm.staleness.values())) for arm in arms]
    shares = [
        [arm.staleness.get(age, 0) / total for arm, total in zip(arms, groups, strict=True)]
        for age in range(oldest + 1)
    ]
    axes.imshow(shares, origin="lower", aspect="auto", cmap="Blues", vmin=0, vmax=1)
    for age, line in enumerate(shares):
        for x, share in enumerate(line):
            colour = "white" if share > 0.55 else "black"
            if share > 0:
                axes.text(x, age, f"{100 * share:.0f} %", ha="center", va="center", fontsize=8, color=colour)
    axes.set_yticks(range(oldest + 1))
    axes.set_ylabel("staleness of trained groups, updates")
    axes.set_title("Staleness", loc="left")
    _name_arms(axes, arms)
