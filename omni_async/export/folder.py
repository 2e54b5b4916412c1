"""Makes a folder that is there whole or not at all, and reports how much of it is written.

It is written beside its final path and renamed. Whatever ends the writing, nothing half is left at that path, and
nothing that was there before is touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from omni_async.checkpoint.folders import sync
from omni_async.config import ConfigError
from omni_async.config.section import size_text

_CHUNK = 16 * 2**20
_LOCK = ".lock"
Progress = Callable[[int], None]  # takes the bytes that were written since it was called last


@contextlib.contextmanager
def whole_folder(out: Path, room: int) -> Iterator[Path]:
    """Give an empty folder to fill; it is at `out` once the context is left without an error.

    Args:
        out: where nothing may be yet.
        room: bytes that the disk has to have for it.

    Raises:
        ConfigError: `out` exists, cannot be written, or the disk is full; one line, and nothing is left behind."""
    out = out.absolute()
    _require_nothing_at(out)
    unfinished = out.with_name(f".{out.name}.partial")
    made = [folder for folder in (out.parent, *out.parent.parents) if not folder.exists()]
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        with _claimed(unfinished, out):
            if (free := shutil.disk_usage(unfinished).free) < room:
                raise ConfigError(f"--out: {out} takes {size_text(room)}, and {size_text(free)} are free there")
            yield unfinished
            (unfinished / _LOCK).unlink()
            for path in (*unfinished.rglob("*"), unfinished):
                sync(path)
            unfinished.rename(out)
        sync(out.parent)
    except BaseException as error:
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()  # only if it is empty
        if isinstance(error, OSError | SafetensorError):
            why = error.strerror if isinstance(error, OSError) else None
            raise ConfigError(f"--out: {out} cannot be written: {why or ' '.join(str(error).split())}") from None
        raise


@contextlib.contextmanager
def _claimed(unfinished: Path, out: Path) -> Iterator[None]:
    """Hold an empty folder that no other export writes, and remove it after an error. ConfigError if another does."""
    lock = unfinished / _LOCK
    with lock.open("wb") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--out: another export is writing {out}; name another folder") from None
        try:
            _require_nothing_at(out)  # another export may have ended since
            for left in unfinished.iterdir():  # by an export that was killed
                if left.is_dir():
                    shutil.rmtree(left)
                elif left != lock:
                    left.unlink()
            yield
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise


def _require_nothing_at(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise ConfigError(f"--out: {out} exists; name a folder that does not, or remove it")


def copy_file(source: Path, target: Path, linked: bool, progress: Progress) -> None:
    """Copy a file's content or, if `linked`, make `target` another name of it where the file system can."""
    source = source.resolve()  # a hub's cache has links to its files
    if linked:
        with contextlib.suppress(OSError):  # another file system
            os.link(source, target)
            progress(source.stat().st_size)
            return
    with source.open("rb") as reading, target.open("wb") as writing:
        while chunk := reading.read(_CHUNK):
            writing.write(chunk)
            progress(len(chunk))
