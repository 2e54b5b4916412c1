"""Shows alerts about a run and the recommended actions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from omni_async.commands.report.blocks import Block, Section, Text
from omni_async.commands.report.shown import Shown, tabs
from omni_async.records.read.alerts import CHECKS, Alert, alerts
from omni_async.records.read.seen import seen_of_run


def alerts_section(shown: Sequence[Shown]) -> Section:
    """Return the section of every run's alerts."""
    lead = f"{len(CHECKS)} checks of the records: of learning, off-policy data, waiting and faults."
    return Section("alerts", "What to know and do", lead, tabs=tabs(shown, _one))


def alert_blocks(found: Iterable[Alert]) -> list[Block]:
    """Return a paragraph per alert."""
    return [
        Text(f"{one.says} {one.do} (docs/{one.docs})", "plain" if one.level == "note" else "warning") for one in found
    ]


def _one(one: Shown) -> list[Block]:
    return alert_blocks(alerts(seen_of_run(one.run))) or [Text("Nothing stands out.", "nothing")]
