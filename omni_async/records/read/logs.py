"""Reads the logs of a run: the last lines of a file, and lines that were added since.

Lines are shown to people: credentials are masked, control characters are removed, and of a progress bar only its last
state is kept. The bytes of a read are bounded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from omni_async.config.reading import open_file
from omni_async.config.redact import redact_text
from omni_async.records.read.record import names_in
from omni_async.records.write.console import indented
from omni_async.records.write.rundir import RunDirectory
from omni_async.worker import Worker

_LARGEST = 2**18  # bytes of a read
_SUFFIX = ".log"


class Lines(NamedTuple):
    """Lines of a log, without line feeds, and the offset in bytes where the next read begins."""

    lines: list[str]
    end: int


def logs_of(run: RunDirectory, worker: str | None = None) -> dict[str, Path]:
    """Return the logs by the worker's name.

    `worker`: a worker's name, or a role for all of its workers; None: every log."""
    names = [name.removesuffix(_SUFFIX) for name in names_in(run.logs, run.path, {}) if name.endswith(_SUFFIX)]
    chosen = [name for name in names if worker in (None, name, Worker.parse(name).role)]
    return {name: run.logs / f"{name}{_SUFFIX}" for name in chosen}


def read_log(path: Path, within: Path, start: int | None = None) -> Lines:
    """Return the whole lines from offset `start` on; None: the last lines of the file.

    Starts at the beginning if the file has become shorter. Skips what is too far back for one read. Raises OSError."""
    with open_file(path, within) as file:
        size = os.fstat(file.fileno()).st_size
        begin = max(0 if start is None or start > size else start, size - _LARGEST)
        file.seek(begin)
        content = file.read(_LARGEST)
    whole = content.rfind(b"\n") + 1
    lines = content[:whole].decode(errors="replace").split("\n")[:-1]
    if begin and begin != start:
        lines = lines[1:]  # the rest of a line
    return Lines([_shown(line) for line in lines], begin + whole)


def _shown(line: str) -> str:
    return indented(redact_text(line.rstrip("\r").rpartition("\r")[2]))
