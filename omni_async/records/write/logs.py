"""Keeps the output of a run's processes in `logs/` of its folder: one file per worker, and `driver.log` of the console.

A file is bounded: once it has `LARGEST` bytes, its content moves to `<name>.log.1` and replaces the earlier content
there. No other user can read the folder, because the code that prints may print anything.

A worker with its own process redirects its output to the file. Workers that share the driver's process keep printing to
the terminal, and `SharedOutput` copies their lines.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from omni_async.aio.clock import Clock
from omni_async.config.writing import append, open_append, open_update, write_atomic
from omni_async.records.write.console import Console, LineConsole, UpdateView
from omni_async.records.write.summary import ValidationPoint

LARGEST = 8 * 2**20  # bytes
DRIVER = "driver"
# Interval of checks of a file's size.
_LOOK_S = 1.0
# Characters of an unfinished line, such as a progress bar, that are held until its end.
_LONGEST_LINE = 2**16
_printing: ContextVar[str | None] = ContextVar("printing", default=None)


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


@contextlib.contextmanager
def printing_as(worker: str) -> Iterator[None]:
    """Attribute output to a worker: that of this context, and of the tasks and daemon threads that it starts."""
    before = _printing.set(worker)
    try:
        yield
    finally:
        _printing.reset(before)


class SharedOutput:
    """Copies the output of workers that share this process to their logs: prints, and log records on the terminal.

    `folder`: the folder of logs. A line is copied when it is complete. Output that Python does not write is not copied,
    for example that of a child process. A log that cannot be written stops nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.RLock()  # a finalizer may print
        self._unfinished: dict[tuple[str, str], str] = {}
        self._wrapped: list[tuple[Any, Callable[[str], int]]] = []

    def open(self) -> None:
        """Begin to copy."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if hasattr(stream, "__dict__"):
                # The stream's method, and not the stream: handlers of loggers hold the stream.
                stream.__dict__["write"] = write = partial(self._write, name, stream.write)
                self._wrapped.append((stream, write))

    def close(self) -> None:
        """End copying; unfinished lines end. A second call does nothing."""
        for stream, write in self._wrapped:
            if stream.__dict__.get("write") is write:
                del stream.__dict__["write"]
        self._wrapped.clear()
        with self._lock:
            for (worker, name), line in [*self._unfinished.items()]:
                if line:
                    self._copy(worker, name, "\n")

    def add(self, worker: str, text: str) -> None:
        """Add whole lines to a worker's log, and not to the terminal."""
        with self._lock:
            self._copy(worker, "", text)

    def _write(self, stream: str, write: Callable[[str], int], text: str) -> int:
        if (worker := _printing.get()) is not None:
            with self._lock:
                self._copy(worker, stream, text)
        return write(text)

    def _copy(self, worker: str, stream: str, text: str) -> None:
        lines, end, rest = (self._unfinished.pop((worker, stream), "") + text).rpartition("\n")
        if len(rest) > _LONGEST_LINE:
            lines, end, rest = f"{lines}{end}{rest}", "\n", ""
        self._unfinished[worker, stream] = rest
        if end:
            path = log_path(self._folder, worker)
            with contextlib.suppress(OSError):
                make_folder(self._folder)
                append(path, f"{lines}\n".encode(errors="backslashreplace"))
                keep_bounded(path)


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
