"""Tests that every admitted group ends in exactly one event."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from omni_async.control.control_state import LedgerState
from omni_async.control.ledger import ConservationError, Ledger
from omni_async.types import LedgerEntry, Terminal


def entry(group: int, event: Terminal = "trained", reason: str | None = None) -> LedgerEntry:
    version, staleness = (1, 0) if event == "trained" else (None, None)
    return LedgerEntry("run-1", group, 3, event, reason, 0, version, staleness, (0, 0), 1, 0.5)


def opened(sink: Callable[[LedgerEntry], None], *live: int, start: LedgerState | None = None) -> Ledger:
    ledger = Ledger(sink, start)
    for group in live:
        ledger.admit(group)
    return ledger


def test_admitted_groups_are_trained_rejected_dropped_or_live() -> None:
    recorded: list[LedgerEntry] = []
    ledger = opened(recorded.append, *range(4))
    events = [entry(2, "rejected", "zero reward variance"), entry(0), entry(1, "dropped", "run interrupted")]
    for event in events:
        ledger.end(event)
    assert recorded == events, "recorded at once and in order"
    assert ledger.counters() == {"admitted": 4, "trained": 1, "rejected": 1, "dropped": 1, "live": 1}
    assert ledger.live == {3}
    assert dict(ledger.reasons) == {"zero reward variance": 1}
    assert dict(ledger.drop_reasons) == {"run interrupted": 1} == ledger.state().drop_reasons
    assert dict(ledger.staleness) == {0: 1}
    ledger.check({3})


def test_a_group_is_admitted_once_and_ends_once_and_books_that_disagree_are_an_error() -> None:
    ledger = Ledger(lambda _: None)
    ledger.admit(0)
    ledger.end(entry(0))
    with pytest.raises(ConservationError, match="group 0 is rejected but not live"):
        ledger.end(entry(0, "rejected"))
    with pytest.raises(ConservationError, match="group 7 is trained but not live"):
        ledger.end(entry(7))
    ledger.admit(4)
    for group in (4, 3):
        with pytest.raises(ConservationError, match=f"group {group} admitted twice"):
            ledger.admit(group)
    ledger.admit(5)
    for live in (set(), {4, 5, 6}, {4, 6}):
        with pytest.raises(ConservationError, match="disagree on groups"):
            ledger.check(live)
