"""Computes the digest that proves weights arrived unchanged. Torch-free, so that emulated roles need no torch.

The digest covers names, dtypes, shapes and contents but neither order nor layout. Equal weights have equal digests
whatever bucket size, iteration order or file made them, and an engine can compute it from its own parameters.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from omni_async.aio.threads import DaemonThread
from omni_async.types import TensorSpec, WeightManifest

Bucket = npt.NDArray[np.uint8]
_Tensor = tuple[str, str, tuple[int, ...], Sequence[Bucket]]

_WORTH_THREADS = 256 * 2**20  # fewer bytes are hashed in a negligible time
_MOST_THREADS = 8  # more threads only wait for memory

_DTYPES_OF_BYTES = {
    1: "bool uint8 int8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu",
    2: "float16 bfloat16 int16 uint16",
    4: "float32 int32 uint32",
    8: "float64 int64 uint64 complex64",
    16: "complex128",
}
_ITEM_BYTES = {dtype: size for size, dtypes in _DTYPES_OF_BYTES.items() for dtype in dtypes.split()}


class WeightError(RuntimeError):
    """Weights differ from their manifest: the receiver must not use them."""


def digest(specs: Iterable[TensorSpec], buckets: Sequence[Bucket], version: int | None = None) -> str:
    """Compute the digest of tensors in buckets.

    Args:
        specs: the tensors, in any order.
        buckets: their bytes.
        version: the weights' version, for the error; None without a version.

    Raises:
        WeightError: as `tensor_pieces`."""
    tensors = [(s.name, s.dtype, s.shape, tensor_pieces(s, buckets, version)) for s in specs]
    total = sum(len(bucket) for bucket in buckets)
    return combine(tensors, threads=hashing_threads() if total >= _WORTH_THREADS else 1)


def verify(manifest: WeightManifest, buckets: Sequence[Bucket]) -> None:
    """Raise WeightError, with both digests, unless the digest of `buckets` is `manifest`'s."""
    actual = digest(manifest.tensors, buckets, manifest.version)
    if actual != manifest.digest:
        raise WeightError(f"weights of version {manifest.version}: expected digest {manifest.digest}, got {actual}")


def combine(tensors: Iterable[_Tensor], threads: int = 1) -> str:
    """Compute xxh3-128, in hexadecimal, of (name, dtype, shape, bytes however they are cut) in any order.

    With one thread, `tensors` is consumed one at a time; with more, all of them are held."""
    # Each tensor is hashed separately and the small hashes are combined in name order. So the result is independent of
    # order, and of threads.
    if threads == 1:
        parts = dict(map(_hashed, tensors))
    else:
        # A hash of many bytes runs without Python's lock. Dealt by size, every thread gets about as many bytes.
        workers = [DaemonThread(f"digest-{number}") for number in range(threads)]
        by_size = sorted(tensors, key=lambda tensor: -sum(map(len, tensor[3])))
        hashes = [workers[at % threads].submit(_hashed, tensor) for at, tensor in enumerate(by_size)]
        parts = dict(one.result() for one in hashes)
    return str(xxhash.xxh3_128_hexdigest("".join(parts[name] for name in sorted(parts)).encode()))


def hashing_threads() -> int:
    """Return how many threads a digest may use: the CPUs of this process's role, or of the process."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return min(_MOST_THREADS, max(1, int(given) if given.isdecimal() else len(os.sched_getaffinity(0))))


def _hashed(tensor: _Tensor) -> tuple[str, str]:
    name, dtype, shape, pieces = tensor
    hashed = xxhash.xxh3_128()
    for piece in pieces:
        hashed.update(piece.data)
    return name, f"{name!r} {dtype} {shape} {hashed.hexdigest()}\n"


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element; WeightError for anything that is not the name of a torch dtype."""
    size = _ITEM_BYTES.get(dtype)
    if size is None:
        raise WeightError(f"unknown tensor dtype {dtype!r}")
    return size


def check_size(spec: TensorSpec, version: int | None = None) -> None:
    """Raise WeightError, naming `version`, unless the pieces of a tensor have as many bytes as its shape."""
    if spec.nbytes != math.prod(spec.shape) * item_bytes(spec.dtype):
        raise WeightError(
            f"{_where(version)}: tensor {spec.name!r} of shape {spec.shape} and dtype {spec.dtype} cannot take"
            f" {spec.nbytes} bytes"
        )


def tensor_pieces(spec: TensorSpec, buckets: Sequence[Bucket], version: int | None = None) -> list[Bucket]:
    """Return views of a tensor's bytes, piece by piece.

    Args:
        spec: the tensor.
        buckets: all buckets, which the tensor's pieces index.
        version: the weights' version, for the error; None without a version.

    Raises:
        WeightError: the dtype is unknown, the pieces do not add up to the shape, or they are not in the buckets."""
    check_size(spec, version)
    for piece in spec.pieces:
        size = len(buckets[piece.bucket]) if 0 <= piece.bucket < len(buckets) else 0
        if piece.offset < 0 or piece.nbytes < 0 or piece.offset + piece.nbytes > size:
            raise WeightError(
                f"{_where(version)}: tensor {spec.name!r} ends at byte {piece.offset + piece.nbytes} of bucket"
                f" {piece.bucket}, which has {size} bytes"
            )
    return [buckets[piece.bucket][piece.offset : piece.offset + piece.nbytes] for piece in spec.pieces]


def _where(version: int | None) -> str:
    return "weights" if version is None else f"weights of version {version}"
