"""The ledger: every admitted group ends in exactly one event, and that is checked, not hoped for.

Owns the counters and hands each terminal event to a sink (a file in production, a list in tests) at the moment it happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

import msgspec

from omni_async.types import LedgerEntry


class ConservationError(AssertionError):
    """admitted != trained + rejected + dropped + live: a group was lost or counted twice. Always a bug of ours."""


class Ledger:
    def __init__(self, sink: Callable[[LedgerEntry], None]) -> None:
        self._sink = sink
        self._live: set[int] = set()
        self._last_group = -1
        self.admitted = 0
        self.events: Counter[str] = Counter({"trained": 0, "rejected": 0, "dropped": 0})
        self.reasons: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()

    @property
    def live(self) -> frozenset[int]:
        return frozenset(self._live)

    def admit(self, group: int) -> None:
        if group <= self._last_group:
            raise ConservationError(f"group {group} admitted twice")
        self._last_group = group
        self._live.add(group)
        self.admitted += 1

    def end(self, entry: LedgerEntry) -> None:
        if entry.group not in self._live:
            raise ConservationError(f"group {entry.group} is {entry.event} but not live: it ended before or was never admitted")
        self._live.remove(entry.group)
        self.events[entry.event] += 1
        if entry.reason is not None:
            self.reasons[entry.reason] += 1
        if entry.staleness is not None:
            self.staleness[entry.staleness] += 1
        self._sink(entry)

    def check(self, live: Set[int]) -> None:
        """Compare with who *should* be live, counted independently (slots); raises ConservationError."""
        ended = sum(self.events.values())
        if self.admitted != ended + len(live) or self._live != live:
            raise ConservationError(
                f"admitted {self.admitted} != {dict(self.events)} + live {len(live)}; "
                f"ledger and slots disagree on groups {sorted(self._live ^ live)[:10]}"
            )

    def counters(self) -> dict[str, int]:
        return {"admitted": self.admitted, **self.events, "live": len(self._live)}

    def summary(self) -> dict[str, Any]:
        """What became of all groups: how many, why, and how old they were trained."""
        staleness = {str(age): count for age, count in sorted(self.staleness.items())}
        return {"conservation": self.counters(), "reasons": dict(self.reasons), "staleness": staleness}


class JsonlSink:
    """Appends a line per event and flushes it, so that a killed run has told all it knew."""

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115 (lives as long as the ledger)
        self._encode = msgspec.json.Encoder().encode

    def __call__(self, entry: Any) -> None:
        self._file.write(self._encode(entry) + b"\n")
