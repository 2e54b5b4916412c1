"""What was lost during a run and came back: a line each in the run folder's `faults.jsonl`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from omni_async.tracking.files import read_lines


class Fault(msgspec.Struct, frozen=True):
    """A part that was lost: when (the clock's seconds), why, what came in its place, and how many seconds later that
    was at work."""

    time: float
    part: str
    reason: str
    replacement: str
    seconds: float


def read_faults(path: Path) -> list[Fault]:
    """In the order they were mended; none if there is no file."""
    return [msgspec.json.decode(line, type=Fault) for line in read_lines(path)]
