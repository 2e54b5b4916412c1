"""Opens files for reading: files that a user names, and files that a foreign folder names.

A user's path may lead anywhere, through links: a recipe, a model folder, a hub's cache. A path from a foreign folder or
file must not leave that folder: pass the folder as `within`. For any kind of file, opening never blocks, and reading
never exceeds a bound.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

# Names, for users, of paths that are not plain files. Opening a pipe waits for a writer, and a device may have no end.
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a link",
}


class TooLargeError(OSError):
    """A file with more bytes than its reader accepts."""


class OutsideError(OSError):
    """A path that leads out of the folder to which it is restricted."""


def require_file(path: str | Path, within: Path | None = None) -> None:
    """Raise OSError, with a `strerror` for users, unless `path` leads to a plain file (links are followed).

    Raises OutsideError if the file is not below the folder `within`."""
    require_plain(Path(path).stat(), path)
    if within is not None:
        require_within(path, within)


def require_within(path: str | Path, folder: Path) -> None:
    """Raise OutsideError if `path`, its links followed, is not below `folder`. Accepts missing files."""
    _require_below(os.path.realpath(path), folder, path)


def real_path(path: str | Path) -> Path:
    """Return the absolute path that `path` leads to. Unlike `Path.resolve`, raises nothing for links in a circle."""
    return Path(os.path.realpath(path))


def is_within(path: str | Path, folder: Path) -> bool:
    """Return whether `path`, its links followed, is `folder` or is below it. Accepts missing files."""
    return real_path(path).is_relative_to(real_path(folder))


def open_file(path: str | Path, within: Path | None = None) -> BinaryIO:
    """Open a plain file for reading.

    Raises OSError like `require_file`. The check is repeated after opening, since the path may have changed."""
    require_file(path, within)
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        require_plain(os.fstat(handle), path)
        if within is not None:
            _require_below(os.path.realpath(f"/proc/self/fd/{handle}"), within, path)
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_file(path: str | Path, largest: int | None = None, within: Path | None = None) -> bytes:
    """Read all bytes of a plain file.

    Raises OSError like `require_file`, and TooLargeError if there are more than `largest`."""
    with open_file(path, within) as file:
        if largest is not None and os.fstat(file.fileno()).st_size > largest:
            raise TooLargeError(errno.EFBIG, f"larger than {largest} bytes", str(path))
        content = file.read(-1 if largest is None else largest + 1)
    if largest is not None and len(content) > largest:
        raise TooLargeError(errno.EFBIG, f"larger than {largest} bytes", str(path))
    return content


def require_plain(found: os.stat_result, path: str | Path) -> None:
    """Raise OSError, with a `strerror` for users, unless `found` describes a plain file named `path` in the error."""
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'something else')}, not a file", str(path))


def _require_below(real: str, folder: Path, path: str | Path) -> None:
    if not Path(real).is_relative_to(os.path.realpath(folder)):
        raise OutsideError(errno.EPERM, "it leads out of its folder", str(path))
