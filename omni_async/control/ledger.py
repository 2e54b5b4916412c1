"""Records that every admitted group ends in exactly one event, and checks it.

Owns the counters and hands each terminal event to a sink (a file in production, a list in tests) at the moment it
happens. A sink's failure is reported in `problem`, which the code that ended the group reads: the counters stay right,
and the run can end in order.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

from omni_async.config.reading import require_file
from omni_async.control.control_state import LedgerState
from omni_async.control.ledger_prefix import encode_line, extend, require_prefix
from omni_async.types import LedgerEntry


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
        self.reasons: Counter[str] = Counter(start.reasons)
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
            self.reasons[entry.reason] += 1
        if entry.staleness is not None:
            self.staleness[entry.staleness] += 1
        line = encode_line(entry)
        self._size, self._digest = self._size + len(line), extend(self._digest, line)
        try:
            self._sink(entry)
        except OSError as error:
            self.problem = self.problem or f"the ledger cannot be written: {error}"

    def check(self, live: Set[int]) -> None:
        """Compare with the groups that *should* be live, counted independently (slots). Raises ConservationError."""
        ended = sum(self.events.values())
        if self.admitted != ended + len(live) or self._live != live:
            raise ConservationError(
                f"admitted {self.admitted} != {dict(self.events)} + live {len(live)}; "
                f"ledger and slots disagree on groups {sorted(self._live ^ live)[:10]}"
            )

    def state(self) -> LedgerState:
        """Return the totals of everything but the live groups, which a resumed run admits again."""
        admitted = self.admitted - len(self._live)
        return LedgerState(
            admitted, dict(self.events), dict(self.reasons), dict(self.staleness), self._size, self._digest
        )

    def counters(self) -> dict[str, int]:
        return {"admitted": self.admitted, **self.events, "live": len(self._live)}

    def summary(self) -> dict[str, Any]:
        """Return how all groups ended: how many, why, and how old they were when trained."""
        staleness = {str(age): count for age, count in sorted(self.staleness.items())}
        return {"conservation": self.counters(), "reasons": dict(self.reasons), "staleness": staleness}


class JsonlSink:
    """A sink that appends a line per event and hands it to the operating system.

    So the file of a killed run has every event. A line that could not be written is written before the next.

    `counted`: which of the lines that are there already count, if not all; LedgerDamaged if the file does not begin
    with them, OSError if it is not a file. The others, of updates that no checkpoint held, are moved to `<name>.void`.
    """

    def __init__(self, path: str | Path, counted: LedgerState | None = None) -> None:
        if counted is not None:
            _keep(Path(path), counted)
        self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115 (lives as long as the ledger)
        self._unwritten = b""

    def __call__(self, entry: Any) -> None:
        self._unwritten += encode_line(entry)
        self._write()

    def _write(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def sync(self) -> None:
        """Make every line survive a crash of the machine. OSError if it does not."""
        self._write()
        os.fsync(self._file.fileno())


def _keep(path: Path, counted: LedgerState) -> None:
    """Move lines that do not count: they are in the void file before they are gone from this one."""
    require_prefix(path, counted)
    if not path.exists():
        return
    require_file(path)
    if path.stat().st_size > counted.size:
        with path.open("r+b") as file, path.with_name(f"{path.name}.void").open("ab") as void:
            file.seek(counted.size)
            shutil.copyfileobj(file, void)
            void.flush()
            file.truncate(counted.size)
