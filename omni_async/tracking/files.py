"""Reads files of lines, and closes files in forked children."""

from __future__ import annotations

import contextlib
import os
import weakref
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from omni_async.config.reading import open_file

T = TypeVar("T")


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


# ---- forked children -------------------------------------------------------------------------------------------------
_own: weakref.WeakSet[Any] = weakref.WeakSet()


def keep_from_children(handle: T) -> T:
    """Close `handle`, a file or a socket, in every child that is forked while it is open here; return it.

    A child that a scorer or a library forks without an exec has every open file of its parent, and with them the
    parent's locks and listening sockets until the child ends, also after the parent was killed. (After an exec they are
    closed already.)"""
    _register()
    _own.add(handle)
    return handle


@cache
def _register() -> None:
    os.register_at_fork(after_in_child=lambda: [handle.close() for handle in [*_own]])
