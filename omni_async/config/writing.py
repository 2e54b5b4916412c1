"""Writes files atomically, and never through a link at their path.

Every result is written to a new name in its folder, synchronised, and renamed. A full disk or a kill leaves the old
file intact.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import re
import secrets
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from omni_async.config.reading import require_plain

_PARTIAL = re.compile(r"\..*\.\d+-[0-9a-f]{16}\.partial(\..*)?", re.DOTALL)
_NEW = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def replacing(path: Path, streams: bool = False) -> Iterator[Path]:
    """Yield the path of an empty file, which replaces `path` when the context exits without an error.

    A link, a pipe or a device at `path` is replaced and not followed. The mode of an existing file is kept.

    Args:
        path: the file.
        streams: yield a device or a pipe, such as /dev/stdout, unchanged: for a path that a user names as an output.

    Raises OSError if the bytes do not fit; a network file system reports that only at synchronisation."""
    if streams and _is_stream(path):
        yield path
        return
    _require_no_folder(path)
    partial, finished = new_beside(path), False
    try:
        yield partial
        with partial.open("rb") as file:
            if (mode := _mode(path)) is not None:
                os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        finished = True
        partial.replace(path)
    except OSError as error:
        if not finished:
            raise
        # A mount point, or another user's file in a shared folder.
        raise OSError(error.errno, f"{error.strerror}; the result is at {partial}", str(path)) from None
    finally:
        if not finished:
            partial.unlink(missing_ok=True)


def write_atomic(path: Path, content: bytes, streams: bool = False) -> None:
    """Write `content` to `path` with `replacing`."""
    with replacing(path, streams) as partial:
        partial.write_bytes(content)


def write_new(path: Path, content: bytes) -> None:
    """Write a file into a folder that nobody reads yet. Replaces an existing file or link; follows no link."""
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.write(content)


def require_replaceable(path: Path) -> None:
    """Raise OSError if `replacing` with `streams` could not begin; change nothing."""
    if _is_stream(path):
        return
    _require_no_folder(path)
    if path.is_file() and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    new_beside(path).unlink()


def new_beside(path: Path) -> Path:
    """Make an empty file with a new hidden name in the folder of `path`, and return its path."""
    # Image writers choose a format by the suffix. The stem is cut because the length of names is limited.
    stem, suffix = os.fsencode(path.stem)[:150], os.fsencode(path.suffix)[:50]
    name = b".%s.%d-%s.partial%s" % (stem, os.getpid(), secrets.token_hex(8).encode(), suffix)
    partial = path.with_name(os.fsdecode(name))
    os.close(os.open(partial, os.O_WRONLY | _NEW, 0o666))
    return partial


def append(path: Path, content: bytes) -> None:
    """Append to a plain file; create a missing file. After an OSError the file has no part of `content`."""
    with open_append(path) as file:
        end = file.tell()
        try:
            while content:
                content = content[file.write(content) :]
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(end)
            raise


def open_append(path: Path) -> FileIO:
    """Open a plain file to write at its end; create a missing file. A write may be partial.

    Raises OSError if the path is a link, a pipe or anything else that is not a plain file."""
    return _open_kept(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def open_update(path: Path) -> BinaryIO:
    """Open an existing plain file, to read and write it in place. Raises OSError like `open_append`."""
    return io.BufferedRandom(_open_kept(path, os.O_RDWR))


def is_partial(path: Path) -> bool:
    """Return whether a file's name comes from `new_beside`: then a killed writer has left the file."""
    return _PARTIAL.fullmatch(path.name) is not None


def open_lock(path: Path) -> FileIO:
    """Open a file, creating a missing file, and lock it until it is closed or the process ends.

    Raises BlockingIOError if the lock is held elsewhere, and OSError like `open_append`."""
    file = _open_kept(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        file.close()
        raise
    return file


def _open_kept(path: Path, flags: int) -> FileIO:
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    except OSError as error:
        why = {errno.ELOOP: "it is a link, not a file", errno.ENXIO: "it is a pipe or a socket, not a file"}
        if error.errno in why:
            raise OSError(errno.EINVAL, why[error.errno], str(path)) from None
        raise
    try:
        require_plain(os.fstat(handle), path)
        return FileIO(handle, "r+" if flags & os.O_RDWR else "a")
    except BaseException:
        os.close(handle)
        raise


def _mode(path: Path) -> int | None:
    """Return the permissions of the plain file at `path`; None if there is none."""
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        return stat.S_IMODE(found.st_mode) if stat.S_ISREG(found.st_mode) else None
    return None


def _require_no_folder(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))


def _is_stream(path: Path) -> bool:
    """Return whether `path` is a device, a pipe, or a name of an open file, which renaming would replace."""
    given = path.absolute()
    named = given.is_relative_to("/proc") or given.is_relative_to("/dev/fd") or str(given).startswith("/dev/std")
    return named or (path.exists() and not path.is_file() and not path.is_dir())
