"""Records that every admitted group ends in exactly one event.

`Ledger` owns the counters and hands each terminal event to a sink (a file in production, a list in tests) at the moment
it happens. A sink's failure is reported in `problem`, which the code that ended the group reads. The counters stay
right, and the run can end in order.

A checkpoint contains the number of lines, their bytes and their digest. The digest is a chain, line by line, so a
checkpoint's digest is enough to extend it. Lines end in a line feed only. `omni_async.records.write.ledger_file` writes
the file, and verifies it before a run resumes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Set
from typing import Any

import msgspec
import xxhash

from omni_async.control.control_state import LedgerState
from omni_async.control.reasons import OTHER
from omni_async.types import LedgerEntry

_ENCODER = msgspec.json.Encoder()
_MOST_REASONS = 1000  # different texts that are counted; they are in every checkpoint


class ConservationError(AssertionError):
    """admitted != trained + rejected + dropped + live: a group was lost or counted twice.

    Always a bug in omni_async."""


class Ledger:
    """The ledger of a run; `start` has the totals of its earlier attempts."""

    def __init__(self, sink: Callable[[LedgerEntry], None], start: LedgerState | None = None) -> None:
        start = start or LedgerState()
        self._sink = sink
        self.problem: str | None = None
        self._live: set[int] = set()
        self._last_group = -1
        self.admitted = start.admitted
        self.events: Counter[str] = Counter({"trained": 0, "rejected": 0, "dropped": 0} | start.events)
        self.reasons: Counter[str] = Counter(start.reasons)  # of rejected groups
        self.drop_reasons: Counter[str] = Counter(start.drop_reasons)
        self.staleness: Counter[int] = Counter(start.staleness)
        self._size, self._digest = start.size, start.digest

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
            raise ConservationError(
                f"group {entry.group} is {entry.event} but not live: it ended before or was never admitted"
            )
        self._live.remove(entry.group)
        self.events[entry.event] += 1
        if entry.reason is not None:
            reasons = self.drop_reasons if entry.event == "dropped" else self.reasons
            reasons[entry.reason if entry.reason in reasons or len(reasons) < _MOST_REASONS else OTHER] += 1
        if entry.staleness is not None:
            self.staleness[entry.staleness] += 1
        line = encode_line(entry)
        self._size, self._digest = self._size + len(line), extend(self._digest, line)
        try:
            self._sink(entry)
        except OSError as error:
            self.problem = self.problem or f"the ledger cannot be written: {error}"

    def check(self, live: Set[int]) -> None:
        """Compare with the groups that *should* be live, counted independently by slots. Raises ConservationError."""
        ended = sum(self.events.values())
        if self.admitted != ended + len(live) or self._live != live:
            raise ConservationError(
                f"admitted {self.admitted} != {dict(self.events)} + live {len(live)}; "
                f"ledger and slots disagree on groups {sorted(self._live ^ live)[:10]}"
            )

    def state(self) -> LedgerState:
        """Return the totals without the live groups, which a resumed run admits again."""
        admitted = self.admitted - len(self._live)
        return LedgerState(
            admitted,
            dict(self.events),
            dict(self.reasons),
            dict(self.staleness),
            self._size,
            self._digest,
            dict(self.drop_reasons),
        )

    def counters(self) -> dict[str, int]:
        return {"admitted": self.admitted, **self.events, "live": len(self._live)}

    def summary(self) -> dict[str, Any]:
        """Return the counts of ended groups, the reasons, and the staleness of trained groups."""
        staleness = {str(age): count for age, count in sorted(self.staleness.items())}
        why = {"reasons": dict(self.reasons), "drop_reasons": dict(self.drop_reasons)}
        return {"conservation": self.counters(), **why, "staleness": staleness}


def encode_line(entry: Any) -> bytes:
    """Encode an entry as a line of the ledger's file."""
    return _ENCODER.encode(entry) + b"\n"


def extend(digest: str, line: bytes) -> str:
    """Return the digest of one more line after those covered by `digest` ("": none): xxh3, 128 bits, hexadecimal.

    It detects accidents, not forgeries."""
    return xxhash.xxh3_128_hexdigest(digest.encode() + line)
