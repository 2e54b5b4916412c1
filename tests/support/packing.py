"""Packs weights as a published version, in memory of their own."""

from collections.abc import Iterable
from typing import Any, Literal

import torch

from omni_async.types import WeightManifest
from omni_async.weights.buckets import BucketSet
from omni_async.weights.digest import Bucket, digest


def pack(
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    version: int,
    payload: Literal["full", "lora"],
    bucket_bytes: int,
    lora: dict[str, Any] | None = None,
) -> tuple[WeightManifest, list[Bucket]]:
    packed = BucketSet(bucket_bytes)
    packed.fill(tensors)
    specs, buckets = packed.specs, packed.buckets
    return WeightManifest(version, payload, digest(specs, buckets), specs, lora), buckets
