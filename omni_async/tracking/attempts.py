"""Reads the attempts of a run: `attempts.jsonl` has a line per process that ended by itself."""

from __future__ import annotations

from pathlib import Path

import msgspec

from omni_async.tracking.files import read_records
from omni_async.tracking.summary import Status


class Attempt(msgspec.Struct, frozen=True):
    """One attempt of a run.

    `began` and `ended` are seconds since the epoch. `from_update`: the update that the attempt continued from;
    `to_update`: the last one it made. `wall_s`: of the whole run up to there, as in the summary."""

    began: float
    ended: float
    status: Status
    reason: str | None
    from_update: int
    to_update: int
    wall_s: float


def read_attempts(path: Path) -> list[Attempt]:
    """Read the attempts in the order they ended; none if there is no file.

    A line that was cut off is skipped. Raises OSError if the path is not a file."""
    return read_records(path, Attempt)
