"""Carries weights through a folder that all machines see: a safetensors file per version, under diffusers names, that
any tool can load.

A version is written under a temporary name and renamed, so a file of the final name is whole. Engines map it into
memory. It is deleted when they all hold another one, and so is what a trainer that was killed has left; the last stays
in the run's folder. Nothing is synced to the device: after a power failure the run starts from a checkpoint, not from
here.
"""

from __future__ import annotations

import asyncio
import mmap
import re
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from omni_async.types import TensorSpec, WeightManifest
from omni_async.weights.digest import Bucket, WeightError, item_bytes, tensor_bytes
from omni_async.weights.transport.base import Join, TransportError

# The format: a little-endian u64 with the length of a JSON header, the header, the tensors' bytes without gaps.
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 64
_LARGEST_HEADER = 100_000_000
_WRITE_BUFFER = 2**20
_OURS = re.compile(r"version-\d{6,}\.(safetensors|tmp)")
_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_NAMES = {short: name for name, short in _DTYPES.items()}


class DiskSender:
    """The sender; `folder` is made when the first version is written."""

    one_by_one = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def connect(self, engines: Mapping[str, Join]) -> None:
        """Does nothing: the parcel tells readers where the file is."""

    @asynccontextmanager
    async def sending(self, manifest: WeightManifest, buckets: list[Bucket]) -> AsyncIterator[str]:
        path = self._folder / f"version-{manifest.version:06d}.safetensors"
        try:
            await asyncio.to_thread(write_version, path, manifest, buckets)
        except OSError as error:
            raise TransportError(
                f"weights.transport: disk: version {manifest.version} cannot be written to {path}:"
                f" {error.strerror or error}"
            ) from error
        yield str(path)
        await asyncio.to_thread(_clear_all_but, path)


def _clear_all_but(newest: Path) -> None:
    """Deletes all other versions that are in the folder, not only those this process wrote: a trainer that was killed
    may have left some, even of a later version."""
    for path in newest.parent.iterdir():
        if path != newest and _OURS.fullmatch(path.name):
            path.unlink(missing_ok=True)


class DiskReceiver:
    async def connect(self, invitation: Any) -> None:
        """Does nothing: a file needs no connection."""

    async def receive(self, manifest: WeightManifest, parcel: str) -> tuple[WeightManifest, list[Bucket]]:
        return await asyncio.to_thread(read_version, Path(parcel), manifest)


def write_version(path: Path, manifest: WeightManifest, buckets: list[Bucket]) -> None:
    """Writes `path` whole or not at all. OSError as the file system raises it; TransportError for a dtype that
    safetensors files lack."""
    # Without gaps every tensor lies at a multiple of its item size if the wider ones come first.
    specs = sorted(manifest.tensors, key=lambda spec: -item_bytes(spec.dtype))
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt", "version": str(manifest.version), "digest": manifest.digest}
    }
    end = 0
    for spec in specs:
        if spec.dtype not in _DTYPES:
            raise TransportError(
                f"weights.transport: disk: safetensors files have no {spec.dtype} ({spec.name!r}); use another"
                " transport"
            )
        header[spec.name] = {
            "dtype": _DTYPES[spec.dtype],
            "shape": spec.shape,
            "data_offsets": (end, end + spec.nbytes),
        }
        end += spec.nbytes
    text = msgspec.json.encode(header)
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNMENT)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    try:
        with unfinished.open("wb", buffering=_WRITE_BUFFER) as file:
            file.write(_LENGTH.pack(len(text)) + text)
            for spec in specs:
                file.write(tensor_bytes(spec, buckets, manifest.version).data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_version(path: Path, manifest: WeightManifest) -> tuple[WeightManifest, list[Bucket]]:
    """Maps the file as one read-only bucket without reading it, and returns it with `manifest` as its tensors are laid
    out there.

    WeightError if it is not a file of that version, or not whole. The caller checks the contents by their digest.
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise WeightError(f"weights of version {manifest.version}: {path} cannot be read: {error}") from error
    data = np.frombuffer(mapped, np.uint8)
    length = _LENGTH.unpack_from(data.data)[0] if len(data) >= _LENGTH.size else _LARGEST_HEADER
    start = _LENGTH.size + length
    if length >= _LARGEST_HEADER or start > len(data):
        raise WeightError(f"weights of version {manifest.version}: {path} is not a safetensors file, or is truncated")
    try:
        header = msgspec.json.decode(data[_LENGTH.size : start].data, type=dict[str, msgspec.Raw])
        about = msgspec.json.decode(header.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WeightError(
            f"weights of version {manifest.version}: {path} is not a safetensors file: {error}"
        ) from error
    if (about.get("version"), about.get("digest")) != (str(manifest.version), manifest.digest):
        raise WeightError(
            f"weights of version {manifest.version} (digest {manifest.digest}): {path} holds version"
            f" {about.get('version')} with digest {about.get('digest')}"
        )
    end = start + max((entry.data_offsets[1] for entry in entries.values()), default=0)
    if end != len(data):
        raise WeightError(
            f"weights of version {manifest.version}: {path} has {len(data)} bytes, its header promises {end}"
        )
    specs = tuple(
        TensorSpec(
            name,
            _NAMES.get(e.dtype, e.dtype),
            e.shape,
            0,
            start + e.data_offsets[0],
            e.data_offsets[1] - e.data_offsets[0],
        )
        for name, e in entries.items()
    )
    return msgspec.structs.replace(manifest, tensors=specs), [data]
