"""Carries weights through the run's object store: written once, mapped by every engine of the machine. In one process
they travel by reference."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from omni_async.store import ObjectStore
from omni_async.types import WeightManifest
from omni_async.weights.digest import Bucket
from omni_async.weights.transport.base import Join


class ObjectStoreSender:
    one_by_one = True

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def connect(self, engines: Mapping[str, Join]) -> None:
        """Does nothing: the store exists already."""

    @asynccontextmanager
    async def sending(self, manifest: WeightManifest, buckets: list[Bucket]) -> AsyncIterator[list[Any]]:
        # One after the other: many writing threads would take the cores from the training thread.
        yield [await self._store.put(bucket) for bucket in buckets]


class ObjectStoreReceiver:
    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def connect(self, invitation: Any) -> None:
        """Does nothing: the store exists already."""

    async def receive(self, manifest: WeightManifest, parcel: list[Any]) -> tuple[WeightManifest, list[Bucket]]:
        return manifest, list(await asyncio.gather(*(self._store.get(reference) for reference in parcel)))
