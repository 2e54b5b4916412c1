"""Opens files that somebody names: a recipe, prompts, a profile. Whatever stands at the path, opening it neither waits
nor reads on for ever."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

# What is no file, as a user would call it. Opened as a file, a pipe waits for a writer, and a device may have no end.
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class TooLargeError(OSError):
    """A file has more bytes than its reader takes."""


def require_file(path: str | Path) -> None:
    """OSError, its `strerror` for users, if `path` leads to nothing or to something that is not a plain file (links are
    followed)."""
    _require_plain_file(Path(path).stat(), path)


def open_file(path: str | Path) -> BinaryIO:
    """A plain file opened for reading. OSError, as from `require_file`, if it is none: looked at again after opening,
    since names change hands."""
    require_file(path)
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _require_plain_file(os.fstat(handle), path)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_file(path: str | Path, largest: int | None = None) -> bytes:
    """All bytes of a plain file. OSError as from `require_file`; TooLargeError if there are more than `largest`."""
    with open_file(path) as file:
        content = file.read(-1 if largest is None else largest + 1)
    if largest is not None and len(content) > largest:
        raise TooLargeError(errno.EFBIG, f"larger than {largest} bytes", str(path))
    return content


def _require_plain_file(found: os.stat_result, path: str | Path) -> None:
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'something else')}, not a file", str(path))
