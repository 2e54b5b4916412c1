"""Records the attempts of a run and its lost parts, a line each: `attempts.jsonl` and `faults.jsonl`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from omni_async.records.write.files import read_records
from omni_async.records.write.summary import Status
from omni_async.types import Count, Seconds, Text, Time


class Attempt(msgspec.Struct, frozen=True):
    """One attempt of a run: a process that ended on its own, without being killed.

    `began` and `ended` are seconds since the epoch. `from_update`: the update that the attempt continued from;
    `to_update`: the last update it made. `wall_s`: of the whole run up to there, as in the summary."""

    began: Time
    ended: Time
    status: Status
    reason: Text | None
    from_update: Count
    to_update: Count
    wall_s: Seconds


class Fault(msgspec.Struct, frozen=True):
    """A part that was lost and then replaced.

    `time` is in the clock's seconds. `seconds`: time until the replacement was at work."""

    time: Time
    part: Text
    reason: Text
    replacement: Text
    seconds: Time


def read_faults(path: Path) -> list[Fault]:
    """Read the faults in the order of their repair; an empty list if there is no file."""
    return read_records(path, Fault)
