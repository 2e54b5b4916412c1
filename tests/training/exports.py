"""Exports a version from several ranks and puts it together on rank 0, as trainer and publisher do."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch.distributed as dist

from omni_async.store import LocalStore
from omni_async.training.engine import TrainEngine
from omni_async.types import WeightManifest
from omni_async.weights.digest import Bucket
from omni_async.weights.snapshot import SharedRows, Snapshot, fetch


def export(engine: TrainEngine, version: int) -> tuple[WeightManifest, list[Bucket]] | None:
    """Returns the whole version on rank 0, None elsewhere. Collective."""
    own = engine.snapshot(version, engine.bucket_set())
    mine = None if own is None else SharedRows(own.tensors, own.buckets)
    found: list[SharedRows | None] = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
    if engine.layout.rank > 0 or own is None:
        return None
    joined = asyncio.run(join(own, [rows for rows in found[1:] if rows is not None]))
    return joined.manifest(), joined.buckets


async def join(own: Snapshot, others: Sequence[SharedRows]) -> Snapshot:
    """Joins rank 0's rows with those of `others`, whose references are the buckets themselves."""

    async def sharing(rows: SharedRows) -> SharedRows:
        return rows

    return await replace(own, others=partial(fetch, LocalStore(), [sharing(rows) for rows in others])).whole()
