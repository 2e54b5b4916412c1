"""Who has worked on a run: one line of `attempts.jsonl` per process that came to an end of its own, written when it
did."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from omni_async.tracking.files import read_lines
from omni_async.tracking.summary import Status


class Attempt(msgspec.Struct, frozen=True):
    """`began` and `ended` are seconds since the epoch. `from_update`: the update that the attempt went on from;
    `to_update`: the one it came to. `wall_s`: of the whole run up to there, as in the summary."""

    began: float
    ended: float
    status: Status
    reason: str | None
    from_update: int
    to_update: int
    wall_s: float


def read_attempts(path: Path) -> list[Attempt]:
    """In the order they ended; none if there is no file. A line that was cut off is none. OSError if it is not a
    file."""
    attempts: list[Attempt] = []
    for line in read_lines(path):
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            attempts.append(msgspec.json.decode(line, type=Attempt))
    return attempts
