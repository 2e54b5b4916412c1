"""Carries weights through the run's object store: written once, mapped by every engine of the machine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from omni_async.store import ObjectStore
from omni_async.types import WeightManifest
from omni_async.weights.digest import Bucket
from omni_async.weights.transport.base import Join


class ObjectStoreSender:
    one_by_one = True

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def init(self, engines: Mapping[str, Join]) -> None:
        """Do nothing: the store exists already."""

    async def start(self, manifest: WeightManifest, sizes: Sequence[int]) -> None:
        """Do nothing: buckets are independent of each other."""

    async def update(self, bucket: Bucket, reference: Any | None) -> Any:
        # One at a time: many writing threads would take the cores from the training thread.
        return await self._store.put(bucket) if reference is None else reference

    async def finish(self, delivered: bool) -> None:
        """Do nothing: a bucket lives as long as a reference to it is held."""


class ObjectStoreReceiver:
    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def init(self, membership: Any) -> None:
        """Do nothing: the store exists already."""

    async def start(self, manifest: WeightManifest, start: None) -> None:
        self._manifest = manifest
        self._references: list[Any] = []

    async def update(self, bucket: Any) -> None:
        self._references.append(bucket)

    async def finish(self) -> tuple[WeightManifest, list[Bucket]]:
        # Concurrently, because buckets on another machine are then fetched in parallel.
        return self._manifest, list(await asyncio.gather(*map(self._store.get, self._references)))
