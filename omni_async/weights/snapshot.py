"""Describes one version of the policy between the trainer, which copied it out, and the publisher, which sends it to
the engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from omni_async.types import TensorSpec, WeightManifest
from omni_async.weights.digest import Bucket, digest


def _keep() -> None:
    """Does nothing: no other snapshot waits for the memory."""


@dataclass(frozen=True)
class Snapshot:
    """A version complete but for its digest, whose computation the trainer does not wait for.

    `release` is called when `buckets` are no longer read; their memory may be overwritten from then on.
    """

    version: int
    payload: Literal["full", "lora"]
    tensors: tuple[TensorSpec, ...]
    buckets: list[Bucket]
    lora: dict[str, Any] | None = None
    release: Callable[[], None] = _keep

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors)

    def manifest(self) -> WeightManifest:
        """Returns the manifest, with the digest of what the buckets hold: reads every byte."""
        return WeightManifest(
            version=self.version,
            payload=self.payload,
            digest=digest(self.tensors, self.buckets),
            tensors=self.tensors,
            lora=self.lora,
        )
