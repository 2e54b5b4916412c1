"""Tests weights through the run's store: by reference in one process, and gone when they have arrived."""

from typing import Any

import numpy as np
import pytest

from omni_async.store import LocalStore
from omni_async.weights.digest import verify
from omni_async.weights.transport.base import receive, sending
from omni_async.weights.transport.object_store import ObjectStoreReceiver, ObjectStoreSender


async def test_in_one_process_the_engine_reads_the_trainers_own_copy(packed):
    store = LocalStore()
    sender, receiver = ObjectStoreSender(store), ObjectStoreReceiver(store)
    await sender.init({"rollout-0": receiver.init})
    async with sending(sender, *packed) as parcel:
        manifest, buckets = await receive(receiver, packed[0], parcel)
    verify(manifest, buckets)
    assert manifest == packed[0]
    assert all(np.shares_memory(a, b) for a, b in zip(buckets, packed[1], strict=True))


async def test_a_bucket_that_is_gone_is_an_error(packed):
    class Forgetful(LocalStore):
        async def get(self, reference: Any) -> Any:
            raise LookupError("object is gone")

    async with sending(ObjectStoreSender(LocalStore()), *packed) as parcel:
        with pytest.raises(LookupError, match="object is gone"):
            await receive(ObjectStoreReceiver(Forgetful()), packed[0], parcel)
