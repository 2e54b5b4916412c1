"""Plots the benchmark: step times, where they go, how busy each role is, and how stale the trained groups are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from omni_async.bench.comparison import CATEGORIES, ArmSummary, compare
from omni_async.bench.result import Overlap

# Okabe and Ito's colours, which colour-blind readers tell apart, and two greys.
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
    """Draw four panels, arms side by side in each. At least one arm must have been measured."""
    figure_of(overlap).savefig(path, dpi=_DPI)


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
    """Put the legend in one line under the title, where no mark can lie."""
    axes.legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 0.99), borderaxespad=0)


def _step_times(axes: Any, arms: list[ArmSummary]) -> None:
    for x, arm in enumerate(arms):
        step = arm.step_s
        errors = [[step.median - step.low], [step.high - step.median]]
        axes.errorbar(
            x,
            step.median,
            errors,
            fmt="o",
            color=_COLOURS["training"],
            capsize=4,
            label="measured (median, quartiles)" if x == 0 else None,
        )
        if arm.law_s is not None:
            axes.hlines(arm.law_s, x - 0.3, x + 0.3, color="black", label="law" if x == 0 else None)
        if arm.simulated_s is not None:
            axes.plot(
                x,
                arm.simulated_s,
                marker="D",
                fillstyle="none",
                color=_COLOURS["switch"],
                linestyle="none",
                label="simulated" if x == 0 else None,
            )
    axes.set_ylim(bottom=0)
    axes.set_ylabel("seconds per update")
    axes.set_title("Step time", loc="left", pad=22)
    _legend_above(axes)
    _name_arms(axes, arms)


def _attribution(axes: Any, arms: list[ArmSummary]) -> None:
    bottoms = [0.0] * len(arms)
    for category, text in CATEGORIES.items():
        heights = [arm.attribution[category] for arm in arms]
        if max(heights) > 0:
            axes.bar(range(len(arms)), heights, bottom=bottoms, color=_COLOURS[category], width=0.7, label=text)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.set_ylabel("seconds per update")
    axes.set_title("Where the trainer's time goes", loc="left")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1), reverse=True)
    _name_arms(axes, arms)


def _roles(axes: Any, arms: list[ArmSummary]) -> None:
    width = 0.8 / len(_ROLES)
    outline = [withStroke(linewidth=1.5, foreground="#333333")]
    for number, role in enumerate(_ROLES):
        centres = [x + (number - 1) * width for x in range(len(arms))]
        bottoms = [0.0] * len(arms)
        for state, colour in _STATES.items():
            heights = [arm.busy.get(role, {}).get(state, 0.0) for arm in arms]
            axes.bar(
                centres, heights, bottom=bottoms, color=colour, width=0.9 * width, label=state if number == 0 else None
            )
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        for centre in centres:
            axes.annotate(
                role,
                (centre, 0.02),
                rotation=90,
                ha="center",
                va="bottom",
                fontsize=7,
                color="white",
                path_effects=outline,
            )
    axes.set_ylim(0, 1)
    axes.set_ylabel("fraction of the time")
    axes.set_title("What each role does", loc="left", pad=22)
    _legend_above(axes)
    _name_arms(axes, arms)


def _staleness(axes: Any, arms: list[ArmSummary]) -> None:
    oldest = max(arm.staleness_max for arm in arms)
    shares = [[_share(arm, age) for arm in arms] for age in range(oldest + 1)]
    axes.imshow(shares, origin="lower", aspect="auto", cmap="Blues", vmin=0, vmax=1)
    for age, line in enumerate(shares):
        for x, share in enumerate(line):
            if share > 0:
                axes.text(
                    x,
                    age,
                    f"{100 * share:.0f} %",
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white" if share > 0.55 else "black",
                )
    axes.set_yticks(range(oldest + 1))
    axes.set_ylabel("staleness of trained groups, updates")
    axes.set_title("Staleness", loc="left")
    _name_arms(axes, arms)


def _share(arm: ArmSummary, age: int) -> float:
    total = sum(arm.staleness.values())
    return arm.staleness.get(age, 0) / total if total else 0.0
