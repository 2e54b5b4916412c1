"""Records what became of a run's attempts and parts, a line each: `attempts.jsonl` and `faults.jsonl`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from omni_async.records.write.files import read_records
from omni_async.records.write.summary import Status
from omni_async.types import Count, Seconds, Text, Time


class Attempt(msgspec.Struct, frozen=True):
    """One attempt of a run: a process that ended by itself.

    `began` and `ended` are seconds since the epoch. `from_update`: the update that the attempt continued from;
    `to_update`: the last one it made. `wall_s`: of the whole run up to there, as in the summary."""

    began: Time
    ended: Time
    status: Status
    reason: Text | None
    from_update: Count
    to_update: Count
    wall_s: Seconds


class Fault(msgspec.Struct, frozen=True):
    """A part that was lost and came back.

    When (the clock's seconds), why, its replacement, and how many seconds later the replacement was at work."""

    time: Time
    part: Text
    reason: Text
    replacement: Text
    seconds: Time


def read_faults(path: Path) -> list[Fault]:
    """Read the faults in the order they were repaired; none if there is no file."""
    return read_records(path, Fault)
