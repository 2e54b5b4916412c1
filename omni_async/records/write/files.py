"""Reads files of lines, and closes files in forked children."""

from __future__ import annotations

import contextlib
import errno
import os
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from omni_async.config.reading import TooLargeError, open_file

T = TypeVar("T")


# No run writes a longer line, or more values in one.
LONGEST_LINE = 2**24  # bytes
_MOST_VALUES = 500_000
# Bounds on a foreign file: lines, and approximate bytes of memory.
MOST_LINES = 300_000
_MOST_MEMORY = 250_000_000
# Values of a record that the constant in `_memory` covers: a struct's field takes less than a value of a mapping.
_FIELDS = 16


def lines_of(path: Path, within: Path | None = None) -> Iterator[bytes]:
    """Yield a file's lines with their line feeds, the only line ends; nothing if there is no file.

    Raises OSError if the path is not a plain file below `within`; TooLargeError at a line longer than runs write."""
    try:
        file = open_file(path, within)
    except FileNotFoundError:
        return
    with file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), 1):
            if len(line) > LONGEST_LINE:
                raise TooLargeError(errno.EFBIG, f"line {number} has more than {LONGEST_LINE} bytes", str(path))
            yield line


def read_lines(path: Path) -> list[bytes]:
    """Read all lines of a file, as from `lines_of`."""
    return [*lines_of(path)]


def read_records(path: Path, kind: type[T], within: Path | None = None) -> list[T]:
    """Decode a file's JSON lines, leaving out incomplete ones; an empty list if there is no file."""
    records: list[T] = []
    decoder = msgspec.json.Decoder(kind)
    for line in lines_of(path, within):
        with contextlib.suppress(ValueError, RecursionError):
            records.append(decode_line(line, decoder))
    return records


def decode_line(line: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode a line. Raises ValueError or RecursionError if it is invalid, or has more values than a run writes."""
    if len(line) > _MOST_VALUES and _values(line) > _MOST_VALUES:
        raise ValueError(f"more than {_MOST_VALUES} values")
    return decoder.decode(line)


def read_foreign(
    path: Path, kind: type[T], within: Path, keep: Callable[[T], bool] | None = None, most: int = MOST_LINES
) -> tuple[list[T], str | None]:
    """Decode the JSON lines of a foreign file as far as they fit into memory; also return why some are missing.

    Args:
        path: the file. A last line that is still being written does not count as damage.
        kind: the type of a line.
        within: the folder that the file must not lead out of.
        keep: returns False for records that decode but are damaged.
        most: maximum number of lines."""
    records: list[T] = []
    number = held = damaged = first = 0
    is_open = "args" in getattr(kind, "__struct_fields__", ("args",))
    decoder = msgspec.json.Decoder(kind)
    why: str | None = None
    try:
        for number, line in enumerate(lines_of(path, within), 1):
            held += _memory(line, is_open)
            if number > most or held > _MOST_MEMORY:
                why = f"it is larger than a page holds, and is read up to line {number - 1}"
                break
            try:
                record = decode_line(line, decoder)
                if keep is None or keep(record):
                    records.append(record)
                    continue
            except (ValueError, RecursionError):
                pass
            if line.endswith(b"\n"):
                first, damaged = first or number, damaged + 1
    except OSError as error:
        why = f"cannot be read: {error.strerror or error}"
    if damaged:
        lines = "1 line" if damaged == 1 else f"{damaged} lines"
        why = f"{lines} cannot be read, the first is line {first}" + (f"; {why}" if why else "")
    return records, why


def _values(line: bytes) -> int:
    return line.count(b",") + line.count(b"{") + line.count(b"[")


def _memory(line: bytes, is_open: bool) -> int:
    """Estimate the bytes that a decoded line takes in memory.

    `is_open`: the record may contain any values, at up to 100 bytes each; otherwise it only has a struct's fields. A
    text takes four bytes a character if any of its characters needs four."""
    wide = 1 if line.isascii() and b"\\u" not in line else 4
    return 300 + wide * len(line) + (80 * _values(line) if is_open else 60 * max(0, line.count(b",") - _FIELDS))


# ---- forked children -------------------------------------------------------------------------------------------------
_own: weakref.WeakSet[Any] = weakref.WeakSet()


def keep_from_children(handle: T) -> T:
    """Close `handle`, a file or a socket, in every child that is forked while it is open here; return it.

    A child that a scorer or a library forks without an exec has every open file of its parent. It keeps the parent's
    locks and listening sockets until it ends, even if the parent was killed. (An exec closes them already.)"""
    _register()
    _own.add(handle)
    return handle


@cache
def _register() -> None:
    os.register_at_fork(after_in_child=lambda: [handle.close() for handle in [*_own]])
