"""Computes the digest that proves weights arrived as they were sent. Torch-free, so that emulated roles need no torch.

The digest covers names, dtypes, shapes and contents but neither order nor layout: equal weights have equal digests
whatever bucket size, iteration order or file made them, and an engine can compute it from its own parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from omni_async.types import TensorSpec, WeightManifest

Bucket = npt.NDArray[np.uint8]

_ITEM_BYTES = {
    **dict.fromkeys(
        (
            "bool",
            "uint8",
            "int8",
            "float8_e4m3fn",
            "float8_e4m3fnuz",
            "float8_e5m2",
            "float8_e5m2fnuz",
            "float8_e8m0fnu",
        ),
        1,
    ),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}


class WeightError(RuntimeError):
    """Weights differ from their manifest: the receiver must not use them."""


def digest(specs: Iterable[TensorSpec], buckets: Sequence[Bucket]) -> str:
    """Computes xxh3-128, in hexadecimal, over names, dtypes, shapes and bytes."""
    return combine((s.name, s.dtype, s.shape, tensor_bytes(s, buckets)) for s in specs)


def verify(manifest: WeightManifest, buckets: Sequence[Bucket]) -> None:
    """Raises WeightError, naming the version and both digests, unless `buckets` hold exactly what `manifest`
    promises."""
    for spec in manifest.tensors:
        tensor_bytes(spec, buckets, manifest.version)
    actual = digest(manifest.tensors, buckets)
    if actual != manifest.digest:
        raise WeightError(f"weights of version {manifest.version}: expected digest {manifest.digest}, got {actual}")


def combine(tensors: Iterable[tuple[str, str, tuple[int, ...], Bucket]]) -> str:
    """Computes the digest of (name, dtype, shape, bytes) in any order."""
    # Each tensor is hashed on its own and the small hashes are combined in name order: that makes the result
    # independent of order.
    parts = {
        name: f"{name!r} {dtype} {shape} {xxhash.xxh3_128_hexdigest(data.data)}\n"
        for name, dtype, shape, data in tensors
    }
    total = xxhash.xxh3_128()
    for name in sorted(parts):
        total.update(parts[name].encode())
    return total.hexdigest()


def item_bytes(dtype: str) -> int:
    """Returns the bytes of one element; WeightError for anything that is not the name of a torch dtype."""
    size = _ITEM_BYTES.get(dtype)
    if size is None:
        raise WeightError(f"unknown tensor dtype {dtype!r}")
    return size


def tensor_bytes(spec: TensorSpec, buckets: Sequence[Bucket], version: int | None = None) -> Bucket:
    """Returns a tensor's bytes, as a view; WeightError, naming `version`, if the buckets cannot hold them."""
    where = "weights" if version is None else f"weights of version {version}"
    if spec.nbytes != int(np.prod(spec.shape, dtype=np.int64)) * item_bytes(spec.dtype):
        raise WeightError(
            f"{where}: tensor {spec.name!r} of shape {spec.shape} and dtype {spec.dtype} cannot take {spec.nbytes}"
            " bytes"
        )
    if not spec.nbytes:
        return np.empty(0, np.uint8)
    size = len(buckets[spec.bucket]) if 0 <= spec.bucket < len(buckets) else 0
    if spec.offset < 0 or spec.offset + spec.nbytes > size:
        raise WeightError(
            f"{where}: tensor {spec.name!r} ends at byte {spec.offset + spec.nbytes} of bucket {spec.bucket}, which has"
            f" {size} bytes"
        )
    return buckets[spec.bucket][spec.offset : spec.offset + spec.nbytes]
