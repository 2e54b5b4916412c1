"""Predicts the gain of single changes of a run, by simulation from the run's own measured times."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from omni_async.commands.report.blocks import Block, Cell, Gain, Gains, Section, Table, Text
from omni_async.commands.report.numbers import number
from omni_async.commands.report.shown import Shown, tabs
from omni_async.config import ConfigError
from omni_async.simulation.run_folder import read_measured
from omni_async.simulation.what_if import LEARNING, Prospect, WhatIf, what_if

TITLE = "Gains of single changes"
_MOST_SIMULATED = 500_000  # bundles of samples: up to a minute; the shipped recipes have up to 420,000
_EACH = 400  # bundles of one simulation: a page has some 40, and nobody waits for long


def what_it_buys(shown: Sequence[Shown]) -> Section:
    """Return the section of predictions for every run with a profile."""
    return Section("what-it-buys", TITLE, LEARNING, tabs=tabs(shown, _one))


def _one(one: Shown) -> list[Block]:
    if one.run.profile is None:
        running = one.run.status == "running"
        why = "the run is under way" if running else "a run writes it at its end, if it made updates"
        return [Text(f"There is no profile.json to predict from: {why}.", "nothing")]
    try:
        found = _answer(one.run.path, one.run.profile.stat().st_mtime_ns)
    except (ConfigError, OSError) as error:
        return [Text(f"Nothing can be predicted: {error}.", "nothing")]
    said = [f"{found.difference[0].upper()}{found.difference[1:]}."] if found.difference else []
    said += [f"Not simulated: {caveat}." for caveat in found.caveats]
    said += [f"Left out: {left.name}: {left.reason}." for left in found.left_out]
    return [Text(_sentence(found)), _gains(found), _table(found), Text(" ".join(said), "nothing")]


@lru_cache(maxsize=16)
def _answer(folder: Path, written: int) -> WhatIf:
    """Simulate, which takes seconds, once for a profile: `written` is the modification time of its file."""
    run = read_measured(folder)
    return what_if(*run[:3], **run.comparison, most=_MOST_SIMULATED, each=_EACH)


def _sentence(found: WhatIf) -> str:
    now, clear = found.present, [one for one in found.changes if one.is_clear and one.gain > 0]
    took = ""
    if found.measured_s is not None and found.model_error is not None:
        took = f" (measured: {number(found.measured_s)} s, so the simulation is off by {found.model_error:+.1%})"
    present = f"As it is, an update takes {number(now.step_s)} s in the simulation{took}, held up by {now.bottleneck}."
    if not clear:
        return f"{present} None of these changes buys more than the simulation is sure of."
    best = max(clear, key=lambda one: one.gain)
    return f"{present} {best.name} would buy the most: {_change(best)} samples per second."


def _change(one: Prospect) -> str:
    return f"{one.gain:+.1%} ± {one.uncertainty:.1%}"


def _gains(found: WhatIf) -> Gains:
    items = [
        Gain(one.name, " ".join(f"{key}={value}" for key, value in one.keys.items()), one.gain, one.uncertainty)
        for one in found.changes
    ]
    hint = (
        "Samples per second against the run as it is; the thin line is the uncertainty: seeds of the service times, and"
        " how far the simulation of the present is from what was measured."
    )
    return Gains("gains", "One change at a time", hint, items)


def _table(found: WhatIf) -> Table:
    columns = [
        "change",
        "s per update",
        "samples/s",
        "gain",
        "more devices",
        "gain each",
        "mean staleness",
        "held up by",
    ]
    rows: list[list[Cell]] = [
        [
            one.name,
            number(one.step_s),
            number(one.images_per_s),
            None if one is found.present else _change(one),
            f"{one.devices:g}",
            None if one.gain_per_device is None else f"{one.gain_per_device:+.1%}",
            number(one.staleness_mean),
            one.bottleneck,
        ]
        for one in (found.present, *found.changes)
    ]
    hint = f"{found.seeds} seeds of {found.updates} updates each were simulated for every row."
    return Table("prospects", "The predictions", columns, rows, hint)
