"""A policy version as flat byte buckets: packing, reading back without a copy, and the digest that proves what arrived.

The layout is a `WeightManifest` (a table of contents, safe to send anywhere) and a list of uint8 arrays. Every tensor starts at a
multiple of `ALIGNMENT` bytes. The digest covers names, dtypes, shapes and contents but neither order nor layout, so equal weights
have equal digests whatever bucket size or iteration order made them; an engine can compute it from its own parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from omni_async.types import TensorSpec, WeightManifest

Bucket = npt.NDArray[np.uint8]

ALIGNMENT = 64


class WeightError(RuntimeError):
    """Weights are not what their manifest says: the receiver must not use them."""


def pack(
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    version: int,
    payload: Literal["full", "lora"],
    bucket_bytes: int,
    lora: dict[str, Any] | None = None,
) -> tuple[WeightManifest, list[Bucket]]:
    """Copies `tensors` into buckets of at most `bucket_bytes`; a larger tensor gets a bucket of its own.

    The iterable is consumed lazily and every tensor is copied once, from its device straight into its bucket, so a generator that
    gathers one shard at a time never holds the whole model twice. ValueError for a repeated name or `bucket_bytes < 1`.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes: expected >= 1, got {bucket_bytes}")
    specs: dict[str, TensorSpec] = {}
    buckets: list[Bucket] = []
    current, used = np.empty(0, np.uint8), 0

    def close() -> None:
        if used:
            buckets.append(current[:used])

    for name, tensor in tensors:
        if name in specs:
            raise ValueError(f"tensor {name!r} appears twice in the weights of version {version}")
        nbytes = tensor.numel() * tensor.element_size()
        offset = -(-used // ALIGNMENT) * ALIGNMENT
        if nbytes and offset + nbytes > len(current):
            close()
            current, used, offset = np.empty(max(bucket_bytes, nbytes), np.uint8), 0, 0
        if nbytes:
            current[used:offset] = 0
            used = offset + nbytes
            _as_tensor(current[offset:used], tensor.dtype, tensor.shape).copy_(tensor.detach())
        specs[name] = TensorSpec(
            name=name,
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            bucket=len(buckets) if nbytes else 0,
            offset=offset if nbytes else 0,
            nbytes=nbytes,
        )
    close()
    table = tuple(specs.values())
    return WeightManifest(version=version, payload=payload, digest=digest(table, buckets), tensors=table, lora=lora), buckets


def unpack(manifest: WeightManifest, buckets: Sequence[Bucket]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, CPU tensor) in the manifest's order. The tensors are views: they keep their bucket alive and must not be written.

    Read-only arrays (Ray's object store maps them so) are fine. WeightError if a bucket is missing or too short.
    """
    writable = [_writable_alias(bucket) for bucket in buckets]
    for spec in manifest.tensors:
        piece = _slice(spec, writable, manifest.version)
        yield spec.name, _as_tensor(piece, dtype_of(spec.dtype), spec.shape)


def digest(specs: Iterable[TensorSpec], buckets: Sequence[Bucket]) -> str:
    """xxh3-128, in hexadecimal, over names, dtypes, shapes and bytes; the same as `digest_tensors` of the packed tensors."""
    return _combine((s.name, s.dtype, s.shape, _slice(s, buckets)) for s in specs)


def digest_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The digest a packed version of `tensors` would have, computed one tensor at a time without packing."""
    return _combine((name, dtype_name(t.dtype), tuple(t.shape), _bytes_of(t)) for name, t in tensors)


def verify(manifest: WeightManifest, buckets: Sequence[Bucket]) -> None:
    """WeightError, naming the version and both digests, unless `buckets` hold exactly what `manifest` promises."""
    for spec in manifest.tensors:
        _slice(spec, buckets, manifest.version)
    actual = digest(manifest.tensors, buckets)
    if actual != manifest.digest:
        raise WeightError(f"weights of version {manifest.version}: expected digest {manifest.digest}, got {actual}")


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The inverse of `dtype_name`; WeightError for anything that is not a torch dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightError(f"unknown tensor dtype {name!r}")
    return dtype


def _combine(tensors: Iterable[tuple[str, str, tuple[int, ...], Bucket]]) -> str:
    # Each tensor is hashed on its own and the small hashes are combined in name order: that makes the result independent of order.
    parts = {name: f"{name!r} {dtype} {shape} {xxhash.xxh3_128_hexdigest(data.data)}\n" for name, dtype, shape, data in tensors}
    total = xxhash.xxh3_128()
    for name in sorted(parts):
        total.update(parts[name].encode())
    return total.hexdigest()


def _slice(spec: TensorSpec, buckets: Sequence[Bucket], version: int | None = None) -> Bucket:
    where = "weights" if version is None else f"weights of version {version}"
    itemsize = dtype_of(spec.dtype).itemsize
    if spec.nbytes != int(np.prod(spec.shape, dtype=np.int64)) * itemsize:
        raise WeightError(f"{where}: tensor {spec.name!r} of shape {spec.shape} and dtype {spec.dtype} cannot take {spec.nbytes} bytes")
    if not spec.nbytes:
        return np.empty(0, np.uint8)
    size = len(buckets[spec.bucket]) if 0 <= spec.bucket < len(buckets) else 0
    if spec.offset < 0 or spec.offset + spec.nbytes > size:
        raise WeightError(
            f"{where}: tensor {spec.name!r} ends at byte {spec.offset + spec.nbytes} of bucket {spec.bucket}, which has {size} bytes"
        )
    return buckets[spec.bucket][spec.offset : spec.offset + spec.nbytes]


def _as_tensor(data: Bucket, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    if not len(data):
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.from_numpy(data).view(dtype).view(tuple(shape))


def _bytes_of(tensor: torch.Tensor) -> Bucket:
    if not tensor.numel():
        return np.empty(0, np.uint8)
    flat: Bucket = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return flat


class _Memory:
    """Describes a bucket's memory through numpy's array interface as writable, and keeps the bucket alive."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        address = bucket.__array_interface__["data"][0]
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": bucket.shape, "data": (address, False)}


def _writable_alias(bucket: Bucket) -> Bucket:
    # torch has no read-only tensors and warns about every array that is; ours are documented as read-only instead. Silencing the warning
    # would change process-wide filters from whichever thread stages weights.
    if bucket.flags.writeable or not bucket.size:
        return bucket
    if not bucket.flags.c_contiguous:
        raise WeightError("a weight bucket must be contiguous")
    return np.asarray(_Memory(bucket))
