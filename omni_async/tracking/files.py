"""Writes files that a reader never sees half written, and reads files of lines."""

from __future__ import annotations

import os
from pathlib import Path

from omni_async.config.reading import open_file


def write_atomic(path: Path, content: bytes) -> None:
    """Writes next to `path`, then renames over it. Raises OSError if the bytes do not fit: a network file system
    reports that only when they are synchronised."""
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
    """Reads a file's lines with their ends, which are line feeds and nothing else; none if there is no file. Raises
    OSError if the path is not a plain file."""
    try:
        with open_file(path) as file:
            return [*file]
    except FileNotFoundError:
        return []
