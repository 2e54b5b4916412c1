"""Reports the result of a search as text: the front, the choice with its reasons, the recipe and the law beside it."""

from __future__ import annotations

from collections.abc import Sequence

from omni_async.performance.law import max_speedup, sync_step
from omni_async.tune.explain import seconds
from omni_async.tune.keys import (
    ENGINES,
    GROUPS,
    INFLIGHT,
    PUBLISH,
    RANKS,
    REWARDERS,
    SWAP,
    TRAJECTORIES,
    WINDOW,
    S,
)
from omni_async.tune.search import LOSS, Point, tolerated
from omni_async.tune.tuning import Tuned

_COLUMNS = {
    S: "S",
    ENGINES: "rollout",
    REWARDERS: "reward",
    RANKS: "trainer",
    TRAJECTORIES: "samples",
    GROUPS: "groups",
    WINDOW: "window",
    PUBLISH: "publish every",
    SWAP: "swap",
    INFLIGHT: "in flight",
}
# A role that works less than this has devices to spare.
_IDLE = 0.6
# Shown only where they differ within the table.
_RARE = {WINDOW, PUBLISH, SWAP, INFLIGHT}


def text(tuned: Tuned) -> str:
    """Return the whole report, for a terminal or a pipe."""
    parts = [
        (
            f"Throughput against staleness: {tuned.devices} {tuned.kind}, profile {tuned.profile}, {tuned.simulations}"
            " simulations"
        ),
        _front(tuned),
        (
            f"* recommended: the smallest S within {100 * tolerated(tuned.noise, LOSS):.2g} % of the best throughput,"
            " and no slower than the recipe; samples and groups are buffer.trajectories and buffer.groups"
        ),
        "",
        "Chosen:",
        *(f"  {path}: {reason}" for path, reason in tuned.reasons.items() if path in tuned.keys),
        "",
        _comparison(tuned),
        *_remarks(tuned),
    ]
    return "\n".join(parts)


def _front(tuned: Tuned) -> str:
    rows = [point.keys for point in tuned.front]
    shown = {path: name for path, name in _COLUMNS.items() if path not in _RARE or len({row[path] for row in rows}) > 1}
    head = ["", "images/s", "per device", "of best", "staleness mean", "max", *shown.values()]
    best = tuned.fastest.images_per_s
    lines = [
        [
            "*" if point == tuned.chosen else "",
            number(point.images_per_s),
            number(point.images_per_s / tuned.devices),
            f"{100 * point.images_per_s / best:.1f} %",
            f"{point.simulated.staleness_mean:.2f}",
            str(point.simulated.staleness_max),
            *(str(point.keys[path]) for path in shown),
        ]
        for point in tuned.front
    ]
    return table([head, *lines])


def _comparison(tuned: Tuned) -> str:
    head = [
        "",
        "devices",
        "images/s",
        "per device",
        "tuned is",
        "s per update",
        "law",
        "bound fraction",
        "staleness mean",
        "max",
    ]
    rows = [
        _row("tuned", tuned, tuned.chosen, tuned.devices),
        _row("recipe as it is", tuned, tuned.recipe, tuned.recipe_devices),
        *(_row(f"schedule: {name}", tuned, point, tuned.devices) for name, point in tuned.in_step.items()),
    ]
    return table([[*head, "busy: rollout", "reward", "trainer"], *rows])


def _row(name: str, tuned: Tuned, point: Point, devices: float) -> list[str]:
    simulated = point.simulated
    per_device = point.images_per_s / devices
    return [
        name,
        f"{devices:g}",
        number(point.images_per_s),
        number(per_device),
        f"{tuned.chosen.images_per_s / tuned.devices / per_device:.2f} x",
        number(simulated.step_s),
        number(simulated.law_s),
        f"{simulated.bound_fraction:.2f}",
        f"{simulated.staleness_mean:.2f}",
        str(simulated.staleness_max),
        *(f"{100 * simulated.busy.get(role, {}).get('busy', 0.0):.0f} %" for role in ("rollout", "reward", "trainer")),
    ]


def _remarks(tuned: Tuned) -> list[str]:
    remarks = [
        "tuned is: its images/s per device over the row's. By the law no overlap is more than"
        f" {max_speedup(tuned.times):.2f} times as fast as schedule: sync on the same split"
        f" ({seconds(sync_step(tuned.times))} per update)."
    ]
    if not tuned.is_no_slower:
        remarks.append(
            f"The recipe as it is makes more images ({number(tuned.recipe.images_per_s)}/s) than anything else that was"
            " tried, so none is written."
        )
    if tuned.shared:
        remarks.append(
            f"{tuned.devices} {tuned.kind} are fewer than the roles take together: they share them, so their numbers"
            " are the recipe's, and the profile's times are taken to have been measured that way."
        )
    for name, point in tuned.in_step.items():
        if point.images_per_s > tuned.chosen.images_per_s:
            remarks.append(
                f"schedule: {name} makes more of these devices: overlap wins back what waits, and here less waits than"
                " a split leaves idle."
            )
    busy = {role: fractions["busy"] for role, fractions in tuned.chosen.simulated.busy.items()}
    for path, each in tuned.devices_each.items():
        role = path.split(".")[0]
        if each and tuned.chosen.keys[path] != 1 and busy[role] < _IDLE:
            remarks.append(
                f"{role} is busy {100 * busy[role]:.0f} %: fewer than {tuned.devices} {tuned.kind} would make as many"
                " images."
            )
    if tuned.noise > 0.001:
        remarks.append(
            f"Another seed changes images/s by about {100 * tuned.noise:.1f} %; the plainer of values that differ by no"
            " more than three times that is chosen."
        )
    if tuned.spent:
        remarks.append(
            f"The search ended after {tuned.simulations} simulations, not by itself; --budget {2 * tuned.simulations}"
            " looks closer."
        )
    return remarks


def table(lines: Sequence[Sequence[str]]) -> str:
    """Format a head and rows as Markdown, aligned to be read as it is."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    rule = ["-" * (width - 1) + ":" if width > 1 else "-" for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in [lines[0], rule, *lines[1:]]
    )


def number(value: float) -> str:
    """Format a number with three significant digits."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
