"""Opens files that a user names: a recipe, prompts, a profile.

Opening a path never blocks and never reads without end, whatever kind of file is there.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

# Names, for users, of paths that are not plain files. Opened as a file, a pipe waits for a writer, and a device may
# have no end.
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class TooLargeError(OSError):
    """A file with more bytes than its reader accepts."""


def require_file(path: str | Path) -> None:
    """Raise OSError, its `strerror` for users, unless `path` leads to a plain file (links are followed)."""
    _require_plain_file(Path(path).stat(), path)


def open_file(path: str | Path) -> BinaryIO:
    """Open a plain file for reading.

    Raises OSError, as from `require_file`, if it is none: checked again after opening, since the path may lead
    elsewhere by then."""
    require_file(path)
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _require_plain_file(os.fstat(handle), path)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_file(path: str | Path, largest: int | None = None) -> bytes:
    """Read all bytes of a plain file.

    Raises OSError as from `require_file`; TooLargeError if there are more than `largest`."""
    with open_file(path) as file:
        content = file.read(-1 if largest is None else largest + 1)
    if largest is not None and len(content) > largest:
        raise TooLargeError(errno.EFBIG, f"larger than {largest} bytes", str(path))
    return content


def _require_plain_file(found: os.stat_result, path: str | Path) -> None:
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'something else')}, not a file", str(path))
