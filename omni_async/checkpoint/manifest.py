"""Records size and digest of every file of a checkpoint.

They distinguish a whole one from one that was cut off or changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from omni_async.checkpoint.errors import CheckpointError, read_json

FILE = "manifest.json"
_FORMAT = 1
_CHUNK = 2**22
_LARGEST = 2**26  # bytes of a manifest: a million files
_ALWAYS = {"state.json"}


class Content(msgspec.Struct, frozen=True):
    """A file's size in bytes and its digest.

    `digest`: xxh3, 128 bits, hexadecimal. It finds accidents, not forgeries: a checkpoint is as trusted as the folder
    it lies in."""

    size: int
    digest: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    files: dict[str, Content]
    format: int = _FORMAT


def write_manifest(folder: Path) -> None:
    """Write the manifest of all that lies in `folder`. Everything, this file last, is on the disk when it returns."""
    files = {name: Content(path.stat().st_size, _digest(path, synced=True)) for name, path in sorted(_files(folder))}
    path = folder / FILE
    path.write_bytes(msgspec.json.format(msgspec.json.encode(Manifest(files)), indent=1) + b"\n")
    for written in (path, *(p for p in folder.rglob("*") if p.is_dir()), folder):
        sync(written)


def check_manifest(folder: Path) -> None:
    """Raise CheckpointError with the first thing that is not as it was written, or that was not written.

    A reader of `folder` meets after this nothing but the files that the manifest names, and some that no reader opens.
    """
    try:
        # First: a wrong path may lead to a folder that holds half a disk, links and pipes included.
        (folder / FILE).lstat()
        found = dict(_files(folder))
    except FileNotFoundError:
        found = {}
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from None
    if FILE not in found:
        raise CheckpointError(f"{folder} is not a whole checkpoint: it has no {FILE}")
    manifest = read_json(found.pop(FILE), Manifest, _FORMAT, _LARGEST)
    if unnamed := {name for name in found.keys() - manifest.files.keys() if not _is_bystander(name)}:
        raise CheckpointError(f"{found[min(unnamed)]} is not what was written: {FILE} does not name it")
    for name, content in manifest.files.items():
        if name not in found:
            raise CheckpointError(f"{folder / FILE} names {name[:200]!r}, which is no file of the checkpoint")
        _check(found[name], content)
    if missing := _ALWAYS - manifest.files.keys():
        raise CheckpointError(f"{folder / FILE} does not name {', '.join(missing)}")


def _is_bystander(name: str) -> bool:
    """Return whether a file is one that people and file systems leave behind, and no reader of a checkpoint opens.

    Such are `.DS_Store`, `.nfs0001`, a note beside the folders."""
    folder, _, file = name.rpartition("/")
    return not file.endswith(".safetensors") and (not folder or file.startswith("."))


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield every file below `folder`, under its path from there.

    Raises CheckpointError for what is no file: a link leads elsewhere, a pipe is waited for, a device has no end."""
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
    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
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
