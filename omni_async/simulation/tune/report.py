"""Reports the result of a search: as text, and as a recipe that extends the searched one.

The text has the front, the choice with its reasons, and the recipe and the law for comparison. The recipe has the
chosen keys, with the reasons as comments.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from omni_async.config import Config, ConfigError, load
from omni_async.config.reading import real_path
from omni_async.config.redact import redact
from omni_async.config.yaml_text import to_yaml
from omni_async.performance.law import max_speedup
from omni_async.simulation.tune.keys import PoolSize, S, count, with_keys
from omni_async.simulation.tune.search import LOSS, MODEST, Point, tolerated
from omni_async.simulation.tune.tuning import Tuned, seconds

_COLUMNS = {
    "staleness.max_updates": "S",
    "rollout.workers": "rollout",
    "reward.workers": "reward",
    "trainer.workers": "trainer",
    "buffer.trajectories": "samples",
    "buffer.groups": "groups",
}
# Shown only if they differ within the table.
_RARE = {
    "buffer.window": "window",
    "weights.publish_every": "publish every",
    "weights.swap": "swap",
    "rollout.max_inflight": "in flight",
}
# A role that works less than this has devices to spare.
_IDLE = 0.6


def text(tuned: Tuned) -> str:
    """Return the whole report, for a terminal or a pipe."""
    head = f"{tuned.devices} {tuned.kind}, profile {tuned.profile}, {tuned.simulations} simulations"
    searched = S in tuned.keys
    marked = f"within {100 * tolerated(tuned.noise, LOSS if searched else MODEST):.2g} % of the best throughput"
    kept = f"the plainest settings {marked} with S = {tuned.chosen.keys[S]}"
    marked = f"the smallest S {marked}" if searched else kept
    parts = [
        f"Throughput against staleness: {head}",
        _front(tuned),
        f"* recommended: {marked}, and no slower than the recipe; samples and groups are buffer.trajectories and"
        " buffer.groups",
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
    shown = _COLUMNS | {path: name for path, name in _RARE.items() if len({row[path] for row in rows}) > 1}
    head = ["", "samples/s", "per device", "of best", "staleness mean", "max", *shown.values()]
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
    head = ["", "devices", "samples/s", "per device", "tuned is", "s per update", "law", "bound fraction"]
    head += ["staleness mean", "max", "busy: rollout", "reward", "trainer"]
    rows = [
        _row("tuned", tuned, tuned.chosen, tuned.devices),
        _row("recipe as it is", tuned, tuned.recipe, tuned.recipe_devices),
        *(_row(f"schedule: {name}", tuned, point, tuned.devices) for name, point in tuned.in_step.items()),
    ]
    return table([head, *rows])


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
        "tuned is: its samples/s per device over the row's. By the law no overlap is more than"
        f" {max_speedup(tuned.times):.2f} times as fast as schedule: sync on the same split"
        f" ({seconds(tuned.times.total)} per update)."
    ]
    if S not in tuned.keys:
        remarks.append(_cap(tuned))
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
    remarks += [
        f"schedule: {name} makes more of these devices: overlap wins back what waits, and here less waits than a split"
        " leaves idle."
        for name, point in tuned.in_step.items()
        if point.images_per_s > tuned.chosen.images_per_s
    ]
    busy = {role: fractions["busy"] for role, fractions in tuned.chosen.simulated.busy.items()}
    for path, each in tuned.devices_each.items():
        role = path.split(".")[0]
        if each and tuned.chosen.keys[path] != 1 and busy[role] < _IDLE:
            remarks.append(
                f"{role} is busy {100 * busy[role]:.0f} %: fewer than {tuned.devices} {tuned.kind} would make as many"
                " images."
            )
    remarks += [_pool(number, pool) for number, pool in enumerate(tuned.pools)]
    if tuned.noise > 0.001:
        remarks.append(
            f"Another seed changes samples/s by about {100 * tuned.noise:.1f} %; the plainer of values that differ by"
            " no more than three times that is chosen."
        )
    if tuned.spent:
        remarks.append(
            f"The search ended after {tuned.simulations} simulations, not by itself; --budget {2 * tuned.simulations}"
            " looks closer."
        )
    return remarks


def _cap(tuned: Tuned) -> str:
    """Return a sentence about an S that was not searched: what it is used for, or that it is too small."""
    budget, simulated = count(tuned.chosen.keys, S), tuned.chosen.simulated
    kept = f"{S}: {budget} is kept"
    if budget < tuned.needed:
        return (
            f"{kept}, and it holds the run up: by the law the slowest stage needs {tuned.needed}. Raise it: it is a"
            " cap."
        )
    used = f"groups are {simulated.staleness_mean:.2f} updates old on average, {simulated.staleness_max} at most"
    return f"{kept}, as a cap: {used}. --staleness searches for the smallest that is enough."


def _pool(number: int, pool: PoolSize) -> str:
    """Return a sentence about the size of a pool of scorers, which is not searched."""
    said = f"reward.pools.{number} ({pool.name}): {pool.workers} of its workers take {seconds(pool.takes_s)} per update"
    others = f"generation and training take {seconds(pool.others_s)}"
    if pool.enough is None:
        return f"{said}, {others}, and no number of workers that was looked at keeps it well below that."
    if pool.enough == pool.workers:
        return f"{said}, {others}: as few as keep it well below that."
    advice = "raise it and tune again" if pool.enough > pool.workers else "fewer would do"
    return f"{said}, {others}: {pool.enough} keep it well below that ({advice})."


def table(lines: Sequence[Sequence[str]]) -> str:
    """Format a head and rows as Markdown, aligned to be readable as plain text."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    rule = ["-" * (width - 1) + ":" if width > 1 else "-" for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in [lines[0], rule, *lines[1:]]
    )


def number(value: float) -> str:
    """Format a number with three significant digits."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


_WIDTH = 140


def require_another_file(out: Path, recipe: Path) -> None:
    """Raise ConfigError, before the search, if the tuned recipe would replace the recipe that it extends."""
    if out.exists() and out.samefile(recipe):
        raise ConfigError(f"--out: {out} is the recipe itself; the tuned one extends it, so give another name")


def write_tuned(out: Path, recipe: Path, config: Config, overrides: Sequence[str], tuned: Tuned) -> None:
    """Write the tuned recipe.

    Args:
        out: The file.
        recipe: The recipe that it extends.
        config: The extended recipe with the command line's overrides.
        overrides: The overrides of the command line, which are written to the file too.
        tuned: The result of the search.

    Raises:
        OSError: It cannot be written."""
    base = os.path.relpath(real_path(recipe), real_path(out.parent))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(_tuned_yaml(base, config, overrides, tuned), encoding="utf-8")
    written = load(out)
    if written != with_keys(written, tuned.chosen.keys):
        raise AssertionError(f"{out} does not read back as what was simulated")


def _tuned_yaml(base: str, config: Config, overrides: Sequence[str], tuned: Tuned) -> str:
    """Return the text of the recipe. `base`: the recipe's path relative to the file's folder."""
    simulated = tuned.chosen.simulated
    head = (
        f"{number(tuned.chosen.images_per_s)} samples/s on {tuned.devices} {tuned.kind} ({number(simulated.step_s)} s"
        f" per update), staleness {simulated.staleness_mean:.2f} on average and {simulated.staleness_max} at most,"
        f" simulated with profile {tuned.profile}. The recipe as it is: {number(tuned.recipe.images_per_s)} samples/s"
        f" on {tuned.recipe_devices:g}. Written by omni-async tune."
    )
    given = _given(config, overrides, tuned.keys)
    lines = [*_comment(head), *_yaml({"extends": base})]
    if "schedule" in tuned.keys:
        lines += [*_comment(f"schedule: {tuned.reasons['schedule']}"), *_yaml({"schedule": tuned.keys["schedule"]})]
    sections = [path.split(".")[0] for path in tuned.keys if "." in path]
    for section in dict.fromkeys([*sections, *given]):
        rest = given.get(section, {})
        if not isinstance(rest, dict):
            lines += _yaml({section: rest})
            continue
        lines.append(f"{section}:")
        for path, value in tuned.keys.items():
            if path.startswith(f"{section}."):
                lines += [f"  {line}" for line in [*_comment(tuned.reasons[path]), *_yaml({path.split(".")[1]: value})]]
        if rest:
            lines += [f"  {line}" for line in ["# given on the command line", *_yaml(rest)]]
    return "\n".join(lines) + "\n"


def _given(config: Config, overrides: Sequence[str], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes of the command line, as a tree of final values, without the keys chosen by tuning.

    If a section was given as a whole, its remaining keys are included."""
    resolved: Any = msgspec.to_builtins(config)
    tree: dict[str, Any] = {}
    for override in overrides:
        path = override.partition("=")[0].strip()
        if path in chosen:
            continue
        value, at, keys = resolved, tree, path.split(".")
        for depth, key in enumerate(keys):
            value = value[key]
            if depth == len(keys) - 1 or not isinstance(value, dict):  # lists are replaced as a whole
                at[key] = value
                break
            at = at.setdefault(key, {})
    for path in chosen:
        section, _, key = path.partition(".")
        if isinstance(tree.get(section), dict):
            tree[section].pop(key, None)
    return {section: redact(rest) for section, rest in tree.items() if rest != {}}


def _comment(text: str) -> list[str]:
    whole_words: Any = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(" ".join(text.split()), _WIDTH, initial_indent="# ", subsequent_indent="#   ", **whole_words)


def _yaml(tree: Mapping[str, Any]) -> list[str]:
    return to_yaml(dict(tree)).splitlines()
