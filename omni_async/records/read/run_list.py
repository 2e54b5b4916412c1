"""Lists the runs in a folder, with their state. Reads the end of each run's metrics only, so it is quick."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from omni_async.config.reading import open_file
from omni_async.records.read.record import RunStatus, run_status
from omni_async.records.read.rounds import is_round
from omni_async.records.write.attempts import Attempt
from omni_async.records.write.files import decode_line, read_foreign
from omni_async.records.write.rundir import RunDirectory
from omni_async.records.write.summary import read_summary
from omni_async.types import count, finite

_LARGEST = 2**18  # bytes of metrics that are read
_METRICS = msgspec.json.Decoder(dict[str, Any])


class ListedRun(msgspec.Struct, frozen=True):
    """A run of a list. `reward`: of its last update, `validation`: of its last round; None: there is none.

    `began`: seconds since the epoch."""

    run: str
    path: str
    status: RunStatus
    update: int
    reward: float | None
    validation: float | None
    began: float


def list_runs(folder: Path) -> list[ListedRun]:
    """Return the runs in a folder, the newest first. A damaged file counts as missing. Raises OSError."""
    runs = [RunDirectory(path) for path in folder.iterdir() if (path / "config.yaml").is_file()]
    return sorted(map(_listed, runs), key=lambda one: (one.began, one.run), reverse=True)


def _listed(run: RunDirectory) -> ListedRun:
    update: dict[str, Any] = {}
    round_: dict[str, Any] = {}
    resumption = run.resumption()
    for line in _last_metrics(run):
        if resumption is not None and count(line.get("update")) is not None and not resumption.counts(line):
            continue
        if is_round(line):
            round_ = line
        elif "finished" in line:
            update = line
    attempts, _ = read_foreign(run.attempts, Attempt, run.path)
    try:
        summary = read_summary(run.summary)
    except (OSError, ValueError, RecursionError):
        summary = None
    return ListedRun(
        run.run_id,
        str(run.path),
        run_status(run, summary, attempts, finite(update.get("finished"))),
        # The lines of many void updates may be all that was read.
        count(update.get("update")) or (0 if resumption is None else resumption.update),
        finite(update.get("reward")),
        finite(round_.get("validation/reward")),
        _began(run),
    )


def _began(run: RunDirectory) -> float:
    second, _ = run.began
    try:
        return datetime.strptime(second, "%Y%m%d-%H%M%S").timestamp()
    except (ValueError, OverflowError):  # the folder was renamed
        return run.config_yaml.stat().st_mtime


def _last_metrics(run: RunDirectory) -> Iterator[dict[str, Any]]:
    try:
        with open_file(run.metrics, run.path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LARGEST))
            content = file.read(_LARGEST)
    except OSError:
        return
    for line in content.splitlines(keepends=True):
        try:
            yield decode_line(line, _METRICS)
        except (ValueError, RecursionError):  # the rest of a line, or an incomplete one
            continue
