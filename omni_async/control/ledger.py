"""Records that every admitted group ends in exactly one event, and writes the file of these events.

`Ledger` owns the counters and hands each terminal event to a sink (a file in production, a list in tests) at the moment
it happens. A sink's failure is reported in `problem`, which the code that ended the group reads. The counters stay
right, and the run can end in order.

A run does not resume from damaged lines: a checkpoint contains the number of lines, their bytes and their digest. The
digest is a chain, line by line, so a checkpoint's digest is enough to extend it. Writing a checkpoint does not read the
lines again, and a resumed run reads them once. Lines end in a line feed only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections import Counter
from collections.abc import Callable, Set
from io import BufferedWriter, FileIO
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from omni_async.config.reading import open_file, require_file
from omni_async.config.writing import open_append, open_update
from omni_async.control.control_state import LedgerState
from omni_async.types import LedgerEntry

_ENCODER = msgspec.json.Encoder()
_LONGEST_LINE = 2**24  # bytes; a longer line is no record


class ConservationError(AssertionError):
    """admitted != trained + rejected + dropped + live: a group was lost or counted twice.

    Always a bug in omni_async."""


class Ledger:
    """The ledger of a run; `start` has the totals of its earlier attempts."""

    def __init__(self, sink: Callable[[LedgerEntry], None], start: LedgerState | None = None) -> None:
        start = start or LedgerState()
        self._sink = sink
        self.problem: str | None = None
        self._live: set[int] = set()
        self._last_group = -1
        self.admitted = start.admitted
        self.events: Counter[str] = Counter({"trained": 0, "rejected": 0, "dropped": 0} | start.events)
        self.reasons: Counter[str] = Counter(start.reasons)  # of rejected groups
        self.drop_reasons: Counter[str] = Counter(start.drop_reasons)
        self.staleness: Counter[int] = Counter(start.staleness)
        self._size, self._digest = start.size, start.digest

    @property
    def live(self) -> frozenset[int]:
        return frozenset(self._live)

    def admit(self, group: int) -> None:
        if group <= self._last_group:
            raise ConservationError(f"group {group} admitted twice")
        self._last_group = group
        self._live.add(group)
        self.admitted += 1

    def end(self, entry: LedgerEntry) -> None:
        if entry.group not in self._live:
            raise ConservationError(
                f"group {entry.group} is {entry.event} but not live: it ended before or was never admitted"
            )
        self._live.remove(entry.group)
        self.events[entry.event] += 1
        if entry.reason is not None:
            (self.drop_reasons if entry.event == "dropped" else self.reasons)[entry.reason] += 1
        if entry.staleness is not None:
            self.staleness[entry.staleness] += 1
        line = encode_line(entry)
        self._size, self._digest = self._size + len(line), extend(self._digest, line)
        try:
            self._sink(entry)
        except OSError as error:
            self.problem = self.problem or f"the ledger cannot be written: {error}"

    def check(self, live: Set[int]) -> None:
        """Compare with the groups that *should* be live, counted independently by slots. Raises ConservationError."""
        ended = sum(self.events.values())
        if self.admitted != ended + len(live) or self._live != live:
            raise ConservationError(
                f"admitted {self.admitted} != {dict(self.events)} + live {len(live)}; "
                f"ledger and slots disagree on groups {sorted(self._live ^ live)[:10]}"
            )

    def state(self) -> LedgerState:
        """Return the totals without the live groups, which a resumed run admits again."""
        admitted = self.admitted - len(self._live)
        return LedgerState(
            admitted,
            dict(self.events),
            dict(self.reasons),
            dict(self.staleness),
            self._size,
            self._digest,
            dict(self.drop_reasons),
        )

    def counters(self) -> dict[str, int]:
        return {"admitted": self.admitted, **self.events, "live": len(self._live)}

    def summary(self) -> dict[str, Any]:
        """Return the counts of ended groups, the reasons, and the staleness of trained groups."""
        staleness = {str(age): count for age, count in sorted(self.staleness.items())}
        why = {"reasons": dict(self.reasons), "drop_reasons": dict(self.drop_reasons)}
        return {"conservation": self.counters(), **why, "staleness": staleness}


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


def encode_line(entry: Any) -> bytes:
    """Encode an entry as a line of the ledger's file."""
    return _ENCODER.encode(entry) + b"\n"


def extend(digest: str, line: bytes) -> str:
    """Return the digest of one more line after those covered by `digest` ("": none): xxh3, 128 bits, hexadecimal.

    It detects accidents, not forgeries."""
    return xxhash.xxh3_128_hexdigest(digest.encode() + line)


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
        for number, line in enumerate(islice(iter(lambda: file.readline(_LONGEST_LINE), b""), lines), 1):
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
