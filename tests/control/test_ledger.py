"""Tests that every admitted group ends in exactly one event."""

from __future__ import annotations

import pytest

from omni_async.control.ledger import ConservationError, Ledger
from omni_async.types import LedgerEntry, Terminal


def entry(group: int, event: Terminal = "trained", reason: str | None = None) -> LedgerEntry:
    version, staleness = (1, 0) if event == "trained" else (None, None)
    return LedgerEntry("run-1", group, 3, event, reason, 0, version, staleness, (0, 0), 1, 0.5)


def test_a_group_is_admitted_once_and_ends_once_and_books_that_disagree_are_an_error() -> None:
    recorded: list[LedgerEntry] = []
    ledger = Ledger(recorded.append)
    for group in range(5):
        ledger.admit(group)
    events = [entry(2, "rejected", "zero reward variance"), entry(0), entry(1, "dropped", "run interrupted")]
    for event in events:
        ledger.end(event)
    assert recorded == events, "recorded at once and in order"
    assert ledger.counters() == {"admitted": 5, "trained": 1, "rejected": 1, "dropped": 1, "live": 2}
    assert dict(ledger.reasons) == {"zero reward variance": 1}
    assert dict(ledger.drop_reasons) == {"run interrupted": 1} == ledger.state().drop_reasons
    with pytest.raises(ConservationError, match="group 0 is rejected but not live"):
        ledger.end(entry(0, "rejected"))
    with pytest.raises(ConservationError, match="group 7 is trained but not live"):
        ledger.end(entry(7))
    for group in (4, 0):
        with pytest.raises(ConservationError, match=f"group {group} admitted twice"):
            ledger.admit(group)
    ledger.check({3, 4})
    for live in (set(), {3, 4, 6}, {4, 6}):
        with pytest.raises(ConservationError, match="disagree on groups"):
            ledger.check(live)


def test_reasons_that_all_differ_are_counted_together_beyond_a_thousand() -> None:
    ledger = Ledger(lambda entry: None)
    for group in range(1500):
        ledger.admit(group)
        ledger.end(entry(group, "dropped", f"request {group} was lost"))
    assert len(ledger.drop_reasons) == 1001 and ledger.drop_reasons["other reasons"] == 500
