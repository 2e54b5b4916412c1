"""Writes files that a reader never sees half written, and reads files of lines."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TypeVar

import msgspec

from omni_async.config.reading import open_file

T = TypeVar("T")


def write_atomic(path: Path, content: bytes) -> None:
    """Write next to `path`, then rename over it.

    Raises OSError if the bytes do not fit: a network file system reports that only when they are synchronised."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_lines(path: Path) -> list[bytes]:
    """Read a file's lines with their ends, which are line feeds and nothing else; none if there is no file.

    Raises OSError if the path is not a plain file."""
    try:
        with open_file(path) as file:
            return [*file]
    except FileNotFoundError:
        return []


def read_records(path: Path, kind: type[T]) -> list[T]:
    """Decode a file's JSON lines, leaving out those that were cut off; none if there is no file."""
    records: list[T] = []
    with contextlib.suppress(FileNotFoundError), open_file(path) as file:
        for line in file:
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                records.append(msgspec.json.decode(line, type=kind))
    return records
