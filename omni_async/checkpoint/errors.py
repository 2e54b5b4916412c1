"""Reads JSON files of a checkpoint that may have been made anywhere, and defines the error for an unusable one."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from omni_async.config.redact import one_line

_LONGEST = 2000
S = TypeVar("S", bound=msgspec.Struct)


class CheckpointError(ValueError):
    """Raised with one line: which checkpoint, and what is wrong with it."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message, _LONGEST))


class _Format(msgspec.Struct):
    format: int = 1


def read_json(path: Path, cls: type[S], form: int, largest: int) -> S:
    """Read a file that the version of formats `form` wrote.

    FileNotFoundError if there is none, CheckpointError, one line, if it is larger than `largest` bytes or is not one.
    """
    try:
        with path.open("rb") as file:
            content = file.read(largest + 1)
        if len(content) > largest:
            raise CheckpointError(f"{path} is larger than {largest} bytes")
        found = msgspec.json.decode(content, type=_Format).format
        if found != form:
            raise CheckpointError(f"{path} has format {found}, this version reads {form}")
        return msgspec.json.decode(content, type=cls)
    except FileNotFoundError:
        raise
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {str(error)[:500]}") from None
