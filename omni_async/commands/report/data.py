"""Turns runs into the data of a page: JSON-compatible plain values, section by section."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from omni_async import __version__
from omni_async.commands.report.alerts import alerts_section
from omni_async.commands.report.blocks import Section
from omni_async.commands.report.configuration import configuration, next_steps
from omni_async.commands.report.correction import correction, steps
from omni_async.commands.report.curves import curves
from omni_async.commands.report.operation import buffers, endings, faults, scorers, throughput
from omni_async.commands.report.pictures import samples
from omni_async.commands.report.shown import Shown, show
from omni_async.commands.report.staleness import staleness
from omni_async.commands.report.verdict import verdict
from omni_async.commands.report.waiting import waiting
from omni_async.commands.report.what_it_buys import what_it_buys
from omni_async.records.read.record import Run

SECTIONS: dict[str, Callable[[Sequence[Shown]], Section]] = {
    "verdict": verdict,
    "curves": curves,
    "samples": samples,
    "alerts": alerts_section,
    "waiting": waiting,
    "throughput": throughput,
    "staleness": staleness,
    "correction": correction,
    "steps": steps,
    "scorers": scorers,
    "buffers": buffers,
    "endings": endings,
    "faults": faults,
    "what-it-buys": what_it_buys,
    "configuration": configuration,
    "next": next_steps,
}


def is_last(section: str) -> bool:
    """Return whether a section is made after the others have read all their data."""
    return section == "verdict"


def page_of(runs: Sequence[Run], made: str, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return the page of the runs.

    Args:
        runs: at least one; the others are compared with the first.
        made: when the page was made, for people.
        names: the sections to return, for a partial refresh; all by default.

    Returns:
        `title`, `made`, `version`, `runs` (label, id, status, colour of each) and `sections`, in their order."""
    shown = show(runs)
    wanted = names or [*SECTIONS]
    # The verdict reports unreadable parts of the runs, so it is made last.
    made_of = {name: msgspec.to_builtins(SECTIONS[name](shown)) for name in sorted(wanted, key=is_last)}
    return {
        "title": " and ".join(one.run.id for one in shown) if len(shown) < 3 else f"{len(shown)} runs",
        "made": made,
        "version": __version__,
        "runs": [
            {"label": one.label, "id": one.run.id, "status": one.run.status, "colour": one.colour} for one in shown
        ],
        "sections": [made_of[name] for name in wanted],
    }
