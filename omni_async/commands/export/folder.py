"""Creates a folder completely or not at all, and reports the progress of writing.

The folder is written next to its final path and renamed. However the writing ends, that path never has a partial
folder, and existing files remain unchanged.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from omni_async.checkpoint.folders import sync
from omni_async.config import ConfigError
from omni_async.config.reading import open_file, real_path
from omni_async.config.section import size_text
from omni_async.config.writing import open_lock, open_update

_CHUNK = 16 * 2**20
_LOCK = ".lock"
Progress = Callable[[int], None]  # takes the bytes written since its last call


@contextlib.contextmanager
def whole_folder(out: Path, room: int) -> Iterator[Path]:
    """Yield an empty folder to fill; it moves to `out` when the context exits without an error.

    Args:
        out: a path that must not exist yet.
        room: bytes of disk space that it needs.

    Raises:
        ConfigError: `out` exists, cannot be written, or the disk is full; one line, and nothing is left behind."""
    out = out.absolute()
    made: list[Path] = []
    try:
        require_nothing_at(out)
        made += [folder for folder in (out.parent, *out.parent.parents) if not folder.exists()]
        out.parent.mkdir(parents=True, exist_ok=True)
        with _claimed(out) as unfinished:
            if (free := shutil.disk_usage(unfinished).free) < room:
                raise ConfigError(f"--out: {out} takes {size_text(room)}, and {size_text(free)} are free there")
            yield unfinished
            (unfinished / _LOCK).unlink()
            for path in (*unfinished.rglob("*"), unfinished):
                sync(path)
            _put(unfinished, out)
        sync(out.parent)
    except BaseException as error:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()  # only if it is empty
        if isinstance(error, OSError | SafetensorError):
            why = error.strerror if isinstance(error, OSError) else None
            raise ConfigError(f"--out: {out} cannot be written: {why or ' '.join(str(error).split())}") from None
        raise


def leftovers(out: Path) -> list[Path]:
    """Return the unfinished folders of killed exports to `out`."""
    return sorted(folder for folder in _unfinished(out) if not _is_held(folder))


@contextlib.contextmanager
def _claimed(out: Path) -> Iterator[Path]:
    """Yield a new folder next to `out`; remove it after an error. Raises ConfigError if another export has one."""
    others = _unfinished(out)
    unfinished = out.with_name(f"{_begin(out)}{os.getpid()}-{secrets.token_hex(8)}.partial")
    unfinished.mkdir()
    try:
        with open_lock(unfinished / _LOCK):
            if any(map(_is_held, {*others, *_unfinished(out)} - {unfinished})):
                raise ConfigError(f"--out: another export is writing {out}; name another folder")
            require_nothing_at(out)  # another export may have ended since
            yield unfinished
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _put(unfinished: Path, out: Path) -> None:
    """Rename a folder to `out`, which must not exist."""
    try:
        out.mkdir()  # renaming replaces an empty folder, which can only be this one
    except FileExistsError:
        require_nothing_at(out)
        raise
    try:
        unfinished.rename(out)
    except BaseException:
        with contextlib.suppress(OSError):
            out.rmdir()
        raise


def _unfinished(out: Path) -> list[Path]:
    """Return the folders (no links) with the names of unfinished exports to `out`."""
    name = re.compile(rf"{re.escape(_begin(out))}\d+-[0-9a-f]{{16}}\.partial")
    try:
        with os.scandir(out.parent) as entries:
            return [
                out.with_name(entry.name)
                for entry in entries
                if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return []


def _begin(out: Path) -> str:
    """Return the prefix of the names of unfinished folders, truncated because a name has a largest length in bytes."""
    return f".{os.fsdecode(os.fsencode(out.name)[:150])}."


def _is_held(unfinished: Path) -> bool:
    try:
        with open_update(unfinished / _LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # it has no lock, or the file does not exist
        return False
    return False


def require_nothing_at(out: Path) -> None:
    """Raise ConfigError if anything exists at `out`, broken links included."""
    if os.path.lexists(out):
        raise ConfigError(f"--out: {out} exists; name a folder that does not, or remove it")


def copy_file(source: Path, target: Path, linked: bool, progress: Progress) -> None:
    """Copy a file's content or, if `linked` and the file system supports it, create a hard link."""
    source = real_path(source)  # a hub's cache has links to its files
    if linked:
        with contextlib.suppress(OSError):  # another file system
            os.link(source, target)
            progress(source.stat().st_size)
            return
    with open_file(source) as reading, target.open("xb") as writing:
        while chunk := reading.read(_CHUNK):
            writing.write(chunk)
            progress(len(chunk))
