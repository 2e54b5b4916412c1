"""Size and digest of every file of a checkpoint: what tells a whole one from one that was cut off or changed."""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath

import msgspec
import xxhash

from omni_async.checkpoint.errors import CheckpointError

FILE = "manifest.json"
_FORMAT = 1
_CHUNK = 2**22
_LARGEST = 2**26  # bytes of a manifest: a million files
_ALWAYS = {"state.json"}


class Content(msgspec.Struct, frozen=True):
    """`digest`: xxh3, 128 bits, hexadecimal. It finds accidents, not forgeries: a checkpoint is as trusted as the folder it lies in."""

    size: int
    digest: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    files: dict[str, Content]
    format: int = _FORMAT


def write_manifest(folder: Path) -> None:
    """Of all that lies in `folder`. Everything, this file last, is on the disk when it returns."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = Content(path.stat().st_size, _digest(path, sync=True))
    path = folder / FILE
    path.write_bytes(msgspec.json.format(msgspec.json.encode(Manifest(files)), indent=1) + b"\n")
    for written in (path, *(p for p in folder.rglob("*") if p.is_dir()), folder):
        _sync(written)


def check_manifest(folder: Path) -> None:
    """CheckpointError with the first thing that is not as it was written."""
    path = folder / FILE
    try:
        if path.stat().st_size > _LARGEST:
            raise CheckpointError(f"{path} is larger than {_LARGEST} bytes")
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a whole checkpoint: it has no {FILE}") from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if manifest.format != _FORMAT:
        raise CheckpointError(f"{path} has format {manifest.format}, this version reads {_FORMAT}")
    for name, content in manifest.files.items():
        _check(folder, name, content)
    if missing := _ALWAYS - manifest.files.keys():
        raise CheckpointError(f"{path} does not name {', '.join(missing)}")


def _check(folder: Path, name: str, content: Content) -> None:
    place = PurePosixPath(name)
    if place.is_absolute() or ".." in place.parts:
        raise CheckpointError(f"{folder / FILE} names {name!r}, which is outside the checkpoint")
    path = folder / place
    try:
        if not path.resolve().is_relative_to(folder.resolve()):
            raise CheckpointError(f"{folder / FILE} names {name!r}, a link to what is outside the checkpoint")
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):  # a pipe would be waited for
            raise CheckpointError(f"{path} is no file")
        if about.st_size != content.size:
            raise CheckpointError(f"{path} has {about.st_size} bytes, {content.size} were written")
        if _digest(path) != content.digest:
            raise CheckpointError(f"{path} is not what was written: its digest differs")
    except CheckpointError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: a name no file can have; RuntimeError: links in a circle
        raise CheckpointError(
            f"{folder / FILE} names {name[:200]!r}, which cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None


def _digest(path: Path, sync: bool = False) -> str:
    found = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
        if sync:
            os.fsync(file.fileno())
    return found.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
