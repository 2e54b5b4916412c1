"""Reads the faults of a run: parts that were lost and came back, a line each in the run folder's `faults.jsonl`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from omni_async.tracking.files import read_lines


class Fault(msgspec.Struct, frozen=True):
    """A part that was lost.

    When (the clock's seconds), why, its replacement, and how many seconds later the replacement was at work."""

    time: float
    part: str
    reason: str
    replacement: str
    seconds: float


def read_faults(path: Path) -> list[Fault]:
    """Read the faults in the order they were repaired; none if there is no file."""
    return [msgspec.json.decode(line, type=Fault) for line in read_lines(path)]
