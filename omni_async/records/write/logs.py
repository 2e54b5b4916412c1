"""Keeps the output of a run's processes in `logs/` of its folder: one file per worker, and `driver.log` of the console.

A file is bounded: once it has `LARGEST` bytes, its content moves to `<name>.log.1` and replaces the earlier content
there. No other user can read the folder, because the code that prints may print anything.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from omni_async.aio.clock import Clock
from omni_async.config.writing import append, open_append, open_update, write_atomic
from omni_async.records.write.console import Console, LineConsole, UpdateView
from omni_async.records.write.summary import ValidationPoint

LARGEST = 8 * 2**20  # bytes
DRIVER = "driver"
# Interval of checks of a file's size.
_LOOK_S = 1.0


def log_path(folder: Path, name: str) -> Path:
    """Return the path of a worker's log. `folder`: the folder of logs."""
    return folder / f"{name}.log"


def make_folder(folder: Path) -> None:
    """Create the folder of logs, which no other user can read."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def capture_output(path: Path) -> None:
    """Append standard output and error of this process, and of its later children, to the file.

    A daemon thread keeps the file bounded. The output stays where it is if the file cannot be written here."""
    with contextlib.suppress(OSError):
        make_folder(path.parent)
        with open_append(path) as log:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(log.fileno(), stream.fileno())
                if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
                    reconfigure(line_buffering=True)
        threading.Thread(target=_keep_bounded, args=(path,), name="bound the log", daemon=True).start()


def _keep_bounded(path: Path) -> None:
    while True:
        time.sleep(_LOOK_S)
        with contextlib.suppress(OSError):  # the folder may be gone, or the disk full
            keep_bounded(path)


def keep_bounded(path: Path) -> None:
    """Move the content of a file with `LARGEST` bytes or more to `<path>.1`.

    The file is emptied in place: other processes that append to it continue at its new end. Lines written between the
    copy and that are lost. Raises OSError if it cannot be read or written."""
    if path.stat().st_size < LARGEST:
        return
    with open_update(path) as file:
        file.seek(-LARGEST, os.SEEK_END)
        write_atomic(path.with_name(f"{path.name}.1"), file.read())
        file.truncate(0)


class LogConsole(LineConsole):
    """Console lines with their time, appended to a bounded file. A file that cannot be written stops nothing."""

    def __init__(self, path: Path, total_updates: int, clock: Clock) -> None:
        super().__init__(sys.stdout, total_updates)
        self._path = path
        self._clock = clock
        with contextlib.suppress(OSError):
            make_folder(path.parent)

    def _write(self, line: str) -> None:
        if self._closed:
            return
        when = datetime.fromtimestamp(self._clock.now())
        with contextlib.suppress(OSError):
            append(self._path, f"{when:%Y-%m-%d %H:%M:%S} {line}\n".encode(errors="backslashreplace"))
            keep_bounded(self._path)


class Consoles:
    """Several consoles that show the same."""

    def __init__(self, *consoles: Console) -> None:
        self._consoles = consoles

    def phase(self, text: str) -> None:
        for one in self._consoles:
            one.phase(text)

    def update(self, view: UpdateView) -> None:
        for one in self._consoles:
            one.update(view)

    def validation(self, point: ValidationPoint) -> None:
        for one in self._consoles:
            one.validation(point)

    def note(self, text: str) -> None:
        for one in self._consoles:
            one.note(text)

    def close(self, last_words: Sequence[str] = ()) -> None:
        for one in self._consoles:
            one.close(last_words)
