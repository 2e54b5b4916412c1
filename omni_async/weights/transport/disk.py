"""Carries weights through a folder that all machines see.

It contains a safetensors file per version, under diffusers names, which any tool can load.

A version is written under a temporary name and renamed, so a file with the final name is whole. Engines map it into
memory. It is deleted when they all hold another one, and so are files left by a killed trainer; the last stays in the
run's folder. Nothing is synced to the device: after a power failure the run starts from a checkpoint, not from these
files.
"""

from __future__ import annotations

import contextlib
import mmap
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import numpy as np

from omni_async.aio.threads import in_daemon_thread
from omni_async.config.reading import open_file
from omni_async.config.tensor_files import read_header
from omni_async.config.writing import new_beside
from omni_async.types import Piece, TensorSpec, WeightManifest
from omni_async.weights.digest import Bucket, WeightError, check_size, item_bytes
from omni_async.weights.transport.base import Join, TransportError

# Before the header (`config/tensor_files.py` has the format).
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64
_WRITE_BUFFER = 2**20
_OURS = re.compile(r"version-\d{6,}\.(safetensors|tmp)|\.version-\d{6,}\.\d+-[0-9a-f]{16}\.partial\.safetensors")
_DTYPES = {f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)}
del _DTYPES["float8"]  # there are two, below
_DTYPES |= {"bool": "BOOL", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
_NAMES = {short: name for name, short in _DTYPES.items()}


class DiskSender:
    """The sender; `folder` is made when the first version is written."""

    one_by_one = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: VersionFile | None = None

    async def init(self, engines: Mapping[str, Join]) -> None:
        """Do nothing: the result of `start` contains the file's path."""

    async def start(self, manifest: WeightManifest, sizes: Sequence[int]) -> str:
        """Begin the file, and return its path once the last bucket is written."""
        path = self._folder / f"version-{manifest.version:06d}.safetensors"
        self._file, self._left = None, len(sizes)
        self._file = file = VersionFile(path, manifest)
        await _write(file, file.open)
        if not sizes:
            await _write(file, file.seal)
        return str(path)

    async def update(self, bucket: Bucket, reference: Any | None) -> None:
        assert self._file is not None
        await _write(self._file, partial(self._file.write, bucket))
        self._left -= 1
        if not self._left:
            await _write(self._file, self._file.seal)

    async def finish(self, delivered: bool) -> None:
        if self._file is not None:
            await in_daemon_thread(self._file.discard)
            if delivered:
                await in_daemon_thread(_clear_all_but, self._file.path)


async def _write(file: VersionFile, work: Callable[[], None]) -> None:
    try:
        await in_daemon_thread(work)
    except OSError as error:
        raise TransportError(
            f"weights.transport: disk: version {file.version} cannot be written to {file.path}:"
            f" {error.strerror or error}"
        ) from error


def _clear_all_but(newest: Path) -> None:
    """Delete all other versions, including later ones left by a killed trainer."""
    for path in newest.parent.iterdir():
        if path != newest and _OURS.fullmatch(path.name):
            path.unlink(missing_ok=True)


class DiskReceiver:
    async def init(self, membership: Any) -> None:
        """Do nothing: a file needs no connection."""

    async def start(self, manifest: WeightManifest, start: str) -> None:
        self._manifest, self._path = manifest, Path(start)

    async def update(self, bucket: None) -> None:
        """Do nothing: the file has all buckets."""

    async def finish(self) -> tuple[WeightManifest, list[Bucket]]:
        return await in_daemon_thread(read_version, self._path, self._manifest)


class VersionFile:
    """A file of a version while it is written, bucket by bucket in their order: whole under `path`, or not there.

    Every method but `discard` raises OSError as the file system does."""

    def __init__(self, path: Path, manifest: WeightManifest) -> None:
        """Lay out the file. TransportError for a dtype unknown to safetensors, WeightError if a tensor lacks bytes."""
        self.version = manifest.version
        self.path = path
        self._header, self._places = _lay_out(manifest)
        self._missing = sum(spec.nbytes for spec in manifest.tensors)
        self._file: BinaryIO | None = None
        self._number = 0

    def open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._unfinished = new_beside(self.path)
        self._file = self._unfinished.open("r+b", buffering=_WRITE_BUFFER)
        self._file.write(_LENGTH.pack(len(self._header)) + self._header)
        self._position = _LENGTH.size + len(self._header)

    def write(self, bucket: Bucket) -> None:
        """Write the pieces in the next bucket. WeightError if it is too short for them."""
        assert self._file is not None
        for start, piece in self._places.get(self._number, ()):
            if piece.offset < 0 or piece.offset + piece.nbytes > len(bucket):
                raise WeightError(
                    f"weights of version {self.version}: bucket {self._number} has {len(bucket)} bytes, and a tensor"
                    f" ends at byte {piece.offset + piece.nbytes} of it"
                )
            if start != self._position:  # pieces are mostly consecutive, and seeking flushes the buffer
                self._file.seek(start)
            self._file.write(bucket[piece.offset : piece.offset + piece.nbytes].data)
            self._position = start + piece.nbytes
            self._missing -= piece.nbytes
        self._number += 1

    def seal(self) -> None:
        """Make the file appear. WeightError if buckets are missing."""
        assert self._file is not None
        if self._missing:
            raise WeightError(
                f"weights of version {self.version}: {self._missing} bytes were in none of {self._number} buckets"
            )
        self._file.close()
        self._unfinished.replace(self.path)

    def discard(self) -> None:
        """Delete the file, unless it was sealed."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk raises again when the buffer is flushed
                self._file.close()
            self._unfinished.unlink(missing_ok=True)


def _lay_out(manifest: WeightManifest) -> tuple[bytes, dict[int, list[tuple[int, Piece]]]]:
    """Return the header of a version's file, and by bucket its pieces with their positions in the file."""
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt", "version": str(manifest.version), "digest": manifest.digest}
    }
    starts: dict[str, int] = {}
    end = 0
    # With the wider dtypes first, every tensor starts at a multiple of its item size without gaps.
    for spec in sorted(manifest.tensors, key=lambda spec: -item_bytes(spec.dtype)):
        if spec.dtype not in _DTYPES:
            raise TransportError(
                f"weights.transport: disk: safetensors files have no {spec.dtype} ({spec.name!r}); use another"
                " transport"
            )
        check_size(spec, manifest.version)
        starts[spec.name], end = end, end + spec.nbytes
        offsets = starts[spec.name], end
        header[spec.name] = {"dtype": _DTYPES[spec.dtype], "shape": spec.shape, "data_offsets": offsets}
    text = msgspec.json.encode(header)
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNMENT)
    places: dict[int, list[tuple[int, Piece]]] = {}
    for spec in manifest.tensors:
        start = _LENGTH.size + len(text) + starts[spec.name]
        for piece in spec.pieces:
            places.setdefault(piece.bucket, []).append((start, piece))
            start += piece.nbytes
    return text, places


def read_version(path: Path, manifest: WeightManifest) -> tuple[WeightManifest, list[Bucket]]:
    """Map the file as one read-only bucket without reading it.

    Returns it with `manifest`, whose pieces are replaced by the file's layout.

    WeightError if it is not a file of that version, or not whole. The caller checks the contents by their digest."""
    wanted = f"weights of version {manifest.version}"
    try:
        with open_file(path, within=path.parent) as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise WeightError(f"{wanted}: {path} cannot be read: {error}") from error
    try:
        header = read_header(cast(BinaryIO, mapped), len(mapped))
    except ValueError as error:
        raise WeightError(f"{wanted}: {path} {error}") from error
    data, about = np.frombuffer(mapped, np.uint8), header.metadata
    if (about.get("version"), about.get("digest")) != (str(manifest.version), manifest.digest):
        raise WeightError(
            f"{wanted} (digest {manifest.digest}): {path} holds version {about.get('version')} with digest"
            f" {about.get('digest')}"
        )
    if header.end != len(data):
        raise WeightError(f"{wanted}: {path} has {len(data)} bytes, its header promises {header.end}")
    specs = []
    for name, entry in header.tensors.items():
        begin, after = entry.data_offsets
        piece = Piece(0, header.begin + begin, after - begin)
        specs.append(TensorSpec(name, _NAMES.get(entry.dtype, entry.dtype), entry.shape, (piece,)))
    return msgspec.structs.replace(manifest, tensors=tuple(specs)), [data]
