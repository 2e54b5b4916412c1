"""Manages the checkpoint folders of a run: which exist, which are whole, and which are deleted.

A manifest records size and digest of every file. It distinguishes a whole checkpoint from one that was cut off or
changed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import xxhash

from omni_async.checkpoint.state import FILE as STATE_FILE
from omni_async.checkpoint.state import CheckpointError, read_json, read_state
from omni_async.checkpoint.trajectories import check_groups, check_tensors
from omni_async.config.reading import open_file
from omni_async.config.writing import write_new

MANIFEST_FILE = "manifest.json"
_FORMAT = 1
_LARGEST = 2**26  # bytes of a manifest
_MOST_VALUES = 1_000_000  # 250,000 files
_NAME = re.compile(r"update-(\d{6,})")
_ASIDE = re.compile(r"\.update-(\d{6,})\.old")


def folder_name(version: int) -> str:
    return f"update-{version:06d}"


def partial(folder: Path) -> Path:
    """Return the path where a checkpoint is written until it is whole."""
    return folder.with_name(f".{folder.name}.partial")


def _aside(folder: Path) -> Path:
    """Return the path where a checkpoint is kept while a new one of the same version replaces it."""
    return folder.with_name(f".{folder.name}.old")


def newest_first(checkpoints: Path) -> Iterator[Path]:
    """Yield the paths of checkpoints, newest first.

    Yields the old copy of a version if the process was killed before the new one was at its final path."""
    yield from by_version(checkpoints).values()


def version_of(folder: Path) -> int | None:
    """Return the version of a checkpoint by its folder's name; None if the name is not a checkpoint's."""
    match = _NAME.fullmatch(folder.name) or _ASIDE.fullmatch(folder.name)
    return int(match[1]) if match else None


def newest_version(checkpoints: Path) -> int:
    """Return the version of the newest checkpoint, by its name; 0 without checkpoints."""
    return max(by_version(checkpoints), default=0)


def links_among(checkpoints: Path) -> list[str]:
    """Return a line for each link among a run's checkpoints. Links are never read: they lead to another run's."""
    found = [checkpoints] if checkpoints.is_symlink() else sorted(checkpoints.glob("update-*"), reverse=True)
    return [f"{path} is a link, and may lead to another run's" for path in found if path.is_symlink()]


def by_version(checkpoints: Path) -> dict[int, Path]:
    """Return the path of every version, the newest first, as `newest_first` yields them."""

    if checkpoints.is_symlink():  # another run's, which this run must not delete
        return {}

    def matching(name: re.Pattern[str]) -> dict[int, Path]:
        return {
            int(match[1]): path
            for path in checkpoints.glob("*")
            if (match := name.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()
        }

    return dict(sorted((matching(_ASIDE) | matching(_NAME)).items(), reverse=True))


def require_whole(folder: Path) -> None:
    """Raise CheckpointError, one line, unless every file is as it was written and the state can be read."""
    check_manifest(folder)
    state = read_state(folder)
    check_tensors(folder)
    check_groups(folder, state)


def rotate(checkpoints: Path, keep: int, written: Path, besides: Callable[[set[int]], set[int]] | None = None) -> None:
    """Remove unfinished checkpoints and all but `written`, the newest before it, and those that `besides` returns.

    Later checkpoints than `written` are removed too. The run was resumed before them, because they are damaged or could
    not be used. Their updates no longer exist, nor do the ledger lines that their states count. Otherwise the next
    resume would try them first, and they would count among the `keep` in place of whole ones.

    Args:
        checkpoints: the run's checkpoint folder.
        keep: how many stay, `written` included.
        written: the newly written checkpoint, at its final path.
        besides: gets versions up to that of `written`; returns which of them stay too."""
    found = [*newest_first(checkpoints)]
    usable = found[found.index(written) :]
    wanted = besides({version for path in usable if (version := version_of(path)) is not None}) if besides else set()
    kept = [path for number, path in enumerate(usable) if number < keep or version_of(path) in wanted]
    for folder in (*found, *checkpoints.glob(".update-*")):
        if folder not in kept:
            remove(folder)


def put_in_place(folder: Path) -> None:
    """Rename `partial(folder)` to its final path; it is on disk when this returns.

    Replaces an existing checkpoint of that version. It is damaged, or the run was resumed from it, stopped before its
    next update, and finished groups since. The old one is kept aside until the new one is at the final path."""
    if os.path.lexists(folder):
        remove(_aside(folder))
        folder.rename(_aside(folder))
    partial(folder).rename(folder)
    sync(folder.parent)
    remove(_aside(folder))


def begin(folder: Path) -> Path:
    """Create an empty `partial(folder)` and return it. Raises OSError: it cannot be made, or its parent is a link."""
    if folder.parent.is_symlink():
        raise OSError(errno.EINVAL, "it is a link, not a folder", str(folder.parent))
    unfinished = partial(folder)
    remove(unfinished)
    unfinished.mkdir(parents=True)
    return unfinished


def remove(folder: Path) -> None:
    """Remove a folder with all its contents, or a link, pipe or device at its path. Leaves files. Ignores errors."""
    if folder.is_symlink() or not (folder.is_dir() or folder.is_file()):  # `rmtree` would wait for a pipe's writer
        with contextlib.suppress(OSError):
            folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


# ---- the manifest ----------------------------------------------------------------------------------------------------


class Content(msgspec.Struct, frozen=True):
    """A file's size in bytes and its digest.

    `digest`: xxh3, 128 bits, hexadecimal. It detects accidents, not forgeries: a checkpoint is as trusted as its parent
    folder."""

    size: int
    digest: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    files: dict[str, Content]
    format: int = _FORMAT


def write_manifest(folder: Path) -> None:
    """Write the manifest of all files in `folder`. Everything is on disk on return; this file is written last."""
    files = {name: Content(path.stat().st_size, _digest(path, synced=True)) for name, path in sorted(_files(folder))}
    path = folder / MANIFEST_FILE
    write_new(path, msgspec.json.format(msgspec.json.encode(Manifest(files)), indent=1) + b"\n")
    for written in (path, *(p for p in folder.rglob("*") if p.is_dir()), folder):
        sync(written)


def check_manifest(folder: Path) -> None:
    """Raise CheckpointError for the first file that is missing, has changed, or is not in the manifest.

    After this call a reader of `folder` finds only files that the manifest names, and some that no reader opens."""
    try:
        # First: a wrong path may lead to a folder that holds half a disk, links and pipes included.
        (folder / MANIFEST_FILE).lstat()
        found = dict(_files(folder))
    except FileNotFoundError:
        found = {}
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from None
    if MANIFEST_FILE not in found:
        raise CheckpointError(f"{folder} is not a whole checkpoint: it has no {MANIFEST_FILE}")
    manifest = read_json(found.pop(MANIFEST_FILE), Manifest, _FORMAT, _LARGEST, _MOST_VALUES)
    if unnamed := {name for name in found.keys() - manifest.files.keys() if not _is_bystander(name)}:
        raise CheckpointError(f"{found[min(unnamed)]} is not what was written: {MANIFEST_FILE} does not name it")
    for name, content in manifest.files.items():
        if name not in found:
            raise CheckpointError(f"{folder / MANIFEST_FILE} names {name[:200]!r}, which is no file of the checkpoint")
        _check(found[name], content)
    if STATE_FILE not in manifest.files:
        raise CheckpointError(f"{folder / MANIFEST_FILE} does not name {STATE_FILE}")


def _is_bystander(name: str) -> bool:
    """Return whether people or file systems leave a file so named (`.DS_Store`, `.nfs01`) and no reader opens it."""
    folder, _, file = name.rpartition("/")
    return not file.endswith(".safetensors") and (not folder or file.startswith("."))


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield every file below `folder`, with its relative path.

    Raises CheckpointError for anything else: a link leads elsewhere, a pipe blocks, a device has no end."""
    folders = [folder]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                path = Path(entry.path)
                if entry.is_dir(follow_symlinks=False):
                    folders.append(path)
                elif entry.is_file(follow_symlinks=False):
                    yield path.relative_to(folder).as_posix(), path
                else:
                    raise CheckpointError(
                        f"{path} is neither a file nor a folder; a checkpoint has no links, pipes or devices"
                    )


def _check(path: Path, content: Content) -> None:
    try:
        size = path.stat().st_size
        if size != content.size:
            raise CheckpointError(f"{path} has {size} bytes, {content.size} were written")
        if _digest(path) != content.digest:
            raise CheckpointError(f"{path} is not what was written: its digest differs")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {str(error)[:500]}") from None


def _digest(path: Path, synced: bool = False) -> str:
    with open_file(path) as file:
        found = hashlib.file_digest(cast(Any, file), xxhash.xxh3_128)
        if synced:
            os.fsync(file.fileno())
    return found.hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or a folder's names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
