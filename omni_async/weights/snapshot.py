"""Describes one version of the policy on its way from the trainer ranks to the publisher.

The ranks copy it out; the publisher sends it to the engines.

Every rank of the first copy of the weights copies its own rows. Rank 0's are in the publisher's process; the others put
theirs into the run's store, and the publisher reads them from there when it sends the version. A tensor of the whole
version then has a piece for every rank, in the order of its rows.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from omni_async.store import ObjectStore
from omni_async.types import Piece, TensorSpec, WeightManifest
from omni_async.weights.digest import Bucket, WeightError, digest, item_bytes


@dataclass(frozen=True)
class SharedRows:
    """The rows of one rank, in the run's store.

    `tensors` have the shapes of the whole tensors and the pieces in the rank's own buckets; `references` are of these
    buckets."""

    tensors: tuple[TensorSpec, ...]
    references: list[Any]


Fetched = Sequence[tuple[SharedRows, list[Bucket]]]


def _keep() -> None:
    """Do nothing: no other snapshot waits for the memory."""


async def _none() -> Fetched:
    """Return no rows: rank 0 has them all."""
    return []


@dataclass(frozen=True)
class Snapshot:
    """A version that lacks only its digest and the rows of `others`, the ranks after this one in their order.

    The trainer does not wait for the digest's computation.

    `release` is called when `buckets` are no longer read; their memory may be overwritten from then on. `references`:
    the buckets' in the run's store, None for a bucket that is not there; empty if no bucket is there."""

    version: int
    payload: Literal["full", "lora"]
    tensors: tuple[TensorSpec, ...]
    buckets: list[Bucket]
    lora: dict[str, Any] | None = None
    release: Callable[[], None] = _keep
    references: tuple[Any, ...] = ()
    others: Callable[[], Awaitable[Fetched]] = _none

    @property
    def nbytes(self) -> int:
        """Return the bytes of the version with the rows of all ranks."""
        return sum(math.prod(spec.shape) * item_bytes(spec.dtype) for spec in self.tensors)

    async def whole(self) -> Snapshot:
        """Return the version with the rows of all ranks. WeightError if they do not hold the same tensors."""
        joined = replace(self, others=_none)
        for number, (rows, buckets) in enumerate(await self.others(), start=1):
            joined = _join(joined, rows, buckets, number)
        return joined

    def manifest(self) -> WeightManifest:
        """Return the manifest with its digest: reads every byte. WeightError if rows are missing."""
        return WeightManifest(
            version=self.version,
            payload=self.payload,
            digest=digest(self.tensors, self.buckets),
            tensors=self.tensors,
            lora=self.lora,
        )


async def fetch(store: ObjectStore, shared: Sequence[Awaitable[SharedRows]]) -> Fetched:
    """Return the ranks' rows from `store`, mapped if on this machine. ObjectLost if some are gone."""
    rows = await asyncio.gather(*shared)
    return [(one, list(await asyncio.gather(*map(store.get, one.references)))) for one in rows]


def _join(snapshot: Snapshot, rows: SharedRows, buckets: list[Bucket], rank: int) -> Snapshot:
    """Add the rows of one more rank, which follow the rows in `snapshot`."""
    first = len(snapshot.buckets)
    have = [(spec.name, spec.dtype, spec.shape) for spec in snapshot.tensors]
    if have != [(spec.name, spec.dtype, spec.shape) for spec in rows.tensors]:
        raise WeightError(f"weights of version {snapshot.version}: rank {rank} copied other tensors out than rank 0")
    tensors = tuple(
        msgspec.structs.replace(
            spec, pieces=spec.pieces + tuple(Piece(p.bucket + first, p.offset, p.nbytes) for p in more.pieces)
        )
        for spec, more in zip(snapshot.tensors, rows.tensors, strict=True)
    )
    references = (*(snapshot.references or [None] * first), *rows.references)
    return replace(snapshot, tensors=tensors, buckets=[*snapshot.buckets, *buckets], references=references)
