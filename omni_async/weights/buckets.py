"""Packs a policy version into flat byte buckets, and reads it back without a copy.

The layout is a `WeightManifest` (a table of contents, safe to send anywhere) and a list of uint8 arrays. Every tensor
starts at a multiple of `ALIGNMENT` bytes. If several ranks hold the rows of a tensor, each has its own rows in its own
buckets (`omni_async.weights.snapshot` joins them). `omni_async.weights.digest` verifies received buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch

from omni_async.types import Piece, TensorSpec, WeightManifest
from omni_async.weights.digest import Bucket, combine, tensor_pieces
from omni_async.weights.digest import WeightError as WeightError

ALIGNMENT = 64
# Tensors are copied together for speed: for small ones a call costs more than its copy. Merged ones stay in memory
# until then, so the batch is bounded.
_BATCH_BYTES = 4 * 2**20


class BucketSet:
    """Buckets of at most `bucket_bytes` that are filled with version after version.

    A larger tensor gets its own bucket. The first `fill` lays them out; later ones copy into the same memory, whose
    pages are mapped already. `allocate(nbytes)` makes a bucket's memory. ValueError for `bucket_bytes < 1`."""

    def __init__(
        self, bucket_bytes: int, allocate: Callable[[int], Bucket] = lambda nbytes: np.empty(nbytes, np.uint8)
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes: expected >= 1, got {bucket_bytes}")
        self._bucket_bytes = bucket_bytes
        self._allocate = allocate
        self._memory: list[Bucket] = []
        self._used: list[int] = []
        self._specs: dict[str, TensorSpec] = {}
        self._targets: list[tuple[str, torch.Tensor]] = []

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(self._specs.values())

    @property
    def buckets(self) -> list[Bucket]:
        """Return views of the filled memory; the next `fill` overwrites them."""
        return [memory[:used] for memory, used in zip(self._memory, self._used, strict=True)]

    @torch.no_grad()
    def fill(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        dtype: torch.dtype | None = None,
        whole: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Copy every tensor once, from its device straight into its bucket.

        Args:
            tensors: Names and tensors. Consumed lazily: a generator that makes one at a time never holds the whole
                model twice.
            dtype: The copies' dtype, if not the tensors' own.
            whole: The whole tensors, if `tensors` contain only this rank's rows.

        Raises:
            ValueError: A name is repeated, or the tensors differ from the first `fill`'s.
        """
        first, number, device = not self._targets, 0, None
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        held = 0
        for name, tensor in tensors:
            if first:
                described = tensor if whole is None else whole[name]
                self._lay_out(name, dtype or tensor.dtype, tensor.shape, tuple(described.shape))
            known, target = self._targets[number] if number < len(self._targets) else ("absent", torch.empty(0))
            if (name, tensor.shape) != (known, target.shape):
                raise ValueError(
                    f"tensor {number} of the weights: expected {known!r} {tuple(target.shape)}, got {name!r}"
                    f" {tuple(tensor.shape)}"
                )
            targets.append(target)
            sources.append(tensor)
            number, device, held = number + 1, tensor.device, held + tensor.nbytes
            if held >= _BATCH_BYTES:
                _copy(targets, sources)
                held = 0
        _copy(targets, sources)
        if number < len(self._targets):
            raise ValueError(f"the weights had {len(self._targets)} tensors, and have {number}")
        if device is not None and device.type != "cpu":
            torch.accelerator.synchronize(device)

    def _lay_out(self, name: str, dtype: torch.dtype, shape: torch.Size, whole: tuple[int, ...]) -> None:
        """Reserve memory for the rows of one more tensor."""
        if name in self._specs:
            raise ValueError(f"tensor {name!r} appears twice in the weights")
        nbytes = shape.numel() * dtype.itemsize
        pieces: tuple[Piece, ...] = ()
        data = np.empty(0, np.uint8)
        if nbytes:
            bucket, offset = self._reserve(nbytes)
            pieces = (Piece(bucket, offset, nbytes),)
            data = self._memory[bucket][offset : offset + nbytes]
        self._specs[name] = TensorSpec(name, dtype_name(dtype), whole, pieces)
        self._targets.append((name, _as_tensor(data, dtype, shape)))

    def _reserve(self, nbytes: int) -> tuple[int, int]:
        """Return bucket and offset of the next `nbytes`."""
        if self._used:
            used = self._used[-1]
            offset = -(-used // ALIGNMENT) * ALIGNMENT
            if offset + nbytes <= len(self._memory[-1]):
                self._memory[-1][used:offset] = 0
                self._used[-1] = offset + nbytes
                return len(self._used) - 1, offset
        self._memory.append(self._allocate(max(self._bucket_bytes, nbytes)))
        self._used.append(nbytes)
        return len(self._used) - 1, 0


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy all of `sources` into `targets`, and empty both lists."""
    if targets:
        # From a GPU into pinned memory the copies queue up; elsewhere the flag changes nothing.
        torch._foreach_copy_(targets, sources, non_blocking=True)
        targets.clear()
        sources.clear()


def unpack(manifest: WeightManifest, buckets: Sequence[Bucket]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, CPU tensor) in the manifest's order.

    A tensor of one piece is a view: it keeps its bucket alive and must not be written. A tensor of several pieces is
    concatenated when it is yielded.

    Read-only arrays (Ray's object store maps them so) are fine. WeightError if a bucket is missing or too short."""
    for spec, pieces in unpack_pieces(manifest, buckets):
        yield spec.name, (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(spec.shape)


def unpack_pieces(
    manifest: WeightManifest, buckets: Sequence[Bucket]
) -> Iterator[tuple[TensorSpec, list[torch.Tensor]]]:
    """Yield every tensor's spec and its elements, in the manifest's order, as flat CPU tensors of its dtype.

    The elements are consecutive views, at least one per tensor. Errors are as in `unpack`."""
    writable = [_writable_alias(bucket) for bucket in buckets]
    for spec in manifest.tensors:
        dtype = dtype_of(spec.dtype)
        pieces = [piece for piece in tensor_pieces(spec, writable, manifest.version) if len(piece)]
        if any(len(piece) % dtype.itemsize for piece in pieces):
            raise WeightError(
                f"weights of version {manifest.version}: a piece of {spec.name!r} ends within an element of"
                f" {spec.dtype}"
            )
        yield spec, [torch.from_numpy(piece).view(dtype) for piece in pieces] or [torch.empty(0, dtype=dtype)]


def as_tensor(bucket: Bucket) -> torch.Tensor:
    """Return a bucket's memory as a uint8 tensor, which must not be written if the bucket must not."""
    return torch.from_numpy(_writable_alias(bucket))


def digest_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Compute the digest that a packed version of `tensors` would have, one tensor at a time without packing."""
    return combine((name, dtype_name(t.dtype), tuple(t.shape), [_bytes_of(t)]) for name, t in tensors)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: `torch.bfloat16` -> `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Invert `dtype_name`; WeightError for anything that is not a torch dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightError(f"unknown tensor dtype {name!r}")
    return dtype


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
    """A bucket's memory as numpy's array interface describes it, writable; keeps the bucket alive."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        address = bucket.__array_interface__["data"][0]
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": bucket.shape, "data": (address, False)}


def _writable_alias(bucket: Bucket) -> Bucket:
    # torch has no read-only tensors and warns about every read-only array; ours are documented as read-only instead.
    # Silencing the warning would change process-wide filters from whichever thread stages weights.
    if bucket.flags.writeable or not bucket.size:
        return bucket
    if not bucket.flags.c_contiguous:
        raise WeightError("a weight bucket must be contiguous")
    return np.asarray(_Memory(bucket))
