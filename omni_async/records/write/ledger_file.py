"""Writes the ledger's file, a line for the end of every group, and verifies it before a run resumes.

A run does not resume from damaged lines: the file must begin with the lines that its checkpoint counts, compared by
their number, bytes and digest. Writing a checkpoint does not read the lines again, and a resumed run reads them once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable
from io import BufferedWriter, FileIO
from itertools import islice
from pathlib import Path

import msgspec

from omni_async.config.reading import open_file, require_file
from omni_async.config.writing import open_append, open_update
from omni_async.control.control_state import LedgerState
from omni_async.control.ledger import encode_line, extend
from omni_async.records.write.files import LONGEST_LINE
from omni_async.types import LedgerEntry


class JsonlSink:
    """A sink that appends a line per event and hands it to the operating system.

    The file of a killed run therefore has every event. A line that could not be written is written before the next.

    `counted`: the prefix of the existing lines that counts, if not all. Raises LedgerDamaged if the file does not begin
    with them, OSError if it is not a file. The other lines, of updates after the checkpoint, are moved to
    `<name>.void`.

    `take_over`: called before the first write to a file that belongs to an earlier attempt, when a group is trained or
    at `sync`; called again if it raised. Until then lines are held in memory. If a resumed attempt ends before its
    first update, its lines for rejected or dropped groups are void: its checkpoint does not count them, and the next
    attempt generates the groups again.
    """

    def __init__(
        self, path: str | Path, counted: LedgerState | None = None, take_over: Callable[[], None] | None = None
    ) -> None:
        self._path, self._counted, self._take_over = Path(path), counted, take_over
        self._unwritten = b""
        self._file = None if take_over else self._open()

    def __call__(self, entry: LedgerEntry) -> None:
        self._unwritten += encode_line(entry)
        if self._file is not None or entry.event == "trained":
            self._write()

    def _open(self) -> FileIO:
        if self._counted is not None:
            _keep(self._path, self._counted)
        return open_append(self._path)

    def _write(self) -> FileIO:
        """Write the lines in memory, and return the file.

        Raises OSError if that fails, also if the file has changed since the attempt began."""
        if self._file is None:
            try:
                if self._take_over is not None:
                    self._take_over()
                self._file = self._open()
            except LedgerDamaged as error:
                raise OSError(str(error)) from None
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        return self._file

    def sync(self) -> None:
        """Make every line survive a crash of the machine. Raises OSError on failure."""
        os.fsync(self._write().fileno())


_MOST_VOID = 2**28  # bytes; an attempt writes about 500 for each group after its last checkpoint


def _keep(path: Path, counted: LedgerState) -> None:
    """Move lines that do not count to the void file, and remove them from this file only afterwards."""
    require_prefix(path, counted)
    if not path.exists():
        return
    require_file(path, within=path.parent)
    if (rest := path.stat().st_size - counted.size) > _MOST_VOID:
        raise OSError(errno.EFBIG, f"{rest} bytes follow the lines that the checkpoint counts; remove them", str(path))
    if rest > 0:
        with open_update(path) as file, BufferedWriter(open_append(path.with_name(f"{path.name}.void"))) as void:
            file.seek(counted.size)
            shutil.copyfileobj(file, void)
            void.flush()
            file.truncate(counted.size)


class LedgerDamaged(ValueError):
    """The file does not begin with the lines that a checkpoint counts; the message describes the damage in one line."""


def require_prefix(path: Path, counted: LedgerState) -> None:
    """Compare the file's first lines with the counted lines.

    Raises LedgerDamaged, or OSError if the file cannot be read."""
    if not counted.lines and not counted.size:
        return
    if not counted.digest:
        raise LedgerDamaged(f"the checkpoint counts {counted.lines} lines of the ledger without their digest")
    lines, size, digest = 0, 0, ""
    with contextlib.suppress(FileNotFoundError), open_file(path, within=path.parent) as file:
        # A line that is cut off, or longer than the counted bytes, does not count.
        while lines < counted.lines and (line := file.readline(counted.size - size + 1)).endswith(b"\n"):
            lines, size, digest = lines + 1, size + len(line), extend(digest, line)
    if lines < counted.lines:
        raise LedgerDamaged(f"the ledger has {lines} lines, the checkpoint counts {counted.lines}")
    if (size, digest) != (counted.size, counted.digest):
        found = _first_damage(path, counted.lines) or "lines are missing, doubled, swapped or changed"
        which = f"the first {counted.lines} lines of the ledger"
        raise LedgerDamaged(f"{which} differ from the lines that the checkpoint counts: {found}")


def _first_damage(path: Path, lines: int) -> str | None:
    """Describe the first damage that is visible in the lines alone.

    This finds neither a changed digit nor a changed order of lines."""
    line_of: dict[int, int] = {}
    with open_file(path, within=path.parent) as file:
        for number, line in enumerate(islice(iter(lambda: file.readline(LONGEST_LINE), b""), lines), 1):
            if not line.strip():
                return f"line {number} is blank"
            try:
                entry = msgspec.json.decode(line, type=LedgerEntry)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return f"line {number} is no record of a group"
            # Earlier versions wrote no text.
            if encode_line(entry) not in (line, line[:-2] + b',"text":""}\n'):
                return f"line {number} is not as it was written"
            if entry.group in line_of:
                return f"line {number} is of group {entry.group}, and so is line {line_of[entry.group]}"
            line_of[entry.group] = number
    return None
