"""Copies a rank's own rows of a policy's weights out, tensor by tensor: no rank holds the whole model for that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from omni_async.weights.buckets import BucketSet
from omni_async.weights.lora import merged_weights
from omni_async.weights.shards import own_rows, rows_like, whole


@torch.no_grad()
def copy_out(
    buckets: BucketSet,
    base: Mapping[str, Tensor],
    adapters: Mapping[str, Tensor],
    scale: float,
    dtype: torch.dtype | None,
    rank: int,
) -> None:
    """Copy the rows that `rank` holds of every weight of `base` into `buckets`, in `dtype` if given.

    `adapters` are merged as `merged_weights` does. Collective where there are adapters: these are gathered, one pair at
    a time."""
    rows: Iterator[tuple[str, Tensor]]
    if adapters:
        rows = merged_weights(
            base,
            adapters,
            scale,
            load=lambda stored: own_rows(stored, rank),
            load_adapter=whole,
            rows=lambda product, stored: rows_like(product, stored, rank),
        )
    else:
        rows = ((name, own_rows(stored, rank)) for name, stored in base.items())
    buckets.fill(rows, dtype, base)
