"""The store of the one-process runtime."""

from __future__ import annotations

import asyncio

import numpy as np

from omni_async.store import LocalStore


def test_in_one_process_the_reference_is_the_value():
    async def main() -> None:
        store, value = LocalStore(), np.zeros(3)
        assert await store.get(await store.put(value)) is value

    asyncio.run(main())
