"""One version of the policy between the trainer, which copied it out, and the publisher, which carries it to the
engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from omni_async.types import TensorSpec, WeightManifest
from omni_async.weights.digest import Bucket, digest


def _keep() -> None:
    """Memory that nobody waits for."""


@dataclass(frozen=True)
class Snapshot:
    """Complete but for its digest, which takes time that the trainer need not wait for.

    `release` is called when nobody reads `buckets` any more; their memory may be overwritten from then on.
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
        """With the digest of what the buckets hold: reads every byte."""
        return WeightManifest(
            version=self.version,
            payload=self.payload,
            digest=digest(self.tensors, self.buckets),
            tensors=self.tensors,
            lora=self.lora,
        )
