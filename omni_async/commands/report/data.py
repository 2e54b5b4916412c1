"""Turns runs into the data of a page: JSON-compatible plain values, section by section."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from omni_async import __version__
from omni_async.commands.report.alerts import alerts_section
from omni_async.commands.report.blocks import Section, fold
from omni_async.commands.report.configuration import configuration, next_steps
from omni_async.commands.report.correction import correction, steps
from omni_async.commands.report.curves import curves
from omni_async.commands.report.operation import buffers, endings, faults, scorers, throughput
from omni_async.commands.report.pictures import samples
from omni_async.commands.report.shown import Shown, show
from omni_async.commands.report.staleness import staleness
from omni_async.commands.report.verdict import result, verdict
from omni_async.commands.report.waiting import waiting
from omni_async.commands.report.what_it_buys import what_it_buys
from omni_async.records.read.record import Run


def _folded(make: Callable[[Sequence[Shown]], Section]) -> Callable[[Sequence[Shown]], Section]:
    return lambda shown: fold(make(shown))


SECTIONS: dict[str, Callable[[Sequence[Shown]], Section]] = {
    "verdict": verdict,
    "samples": samples,
    "result": result,
    "curves": curves,
    "alerts": alerts_section,
    "waiting": waiting,
    "throughput": _folded(throughput),
    "staleness": _folded(staleness),
    "correction": _folded(correction),
    "steps": _folded(steps),
    "scorers": _folded(scorers),
    "buffers": _folded(buffers),
    "endings": _folded(endings),
    "faults": _folded(faults),
    "what-it-buys": _folded(what_it_buys),
    "configuration": _folded(configuration),
    "next": _folded(next_steps),
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
