"""Tests the store of the one-process runtime, and how large a value is."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from omni_async.store import LocalStore, nbytes


def test_in_one_process_the_reference_is_the_value():
    async def main() -> None:
        store, value = LocalStore(), np.zeros(3)
        assert await store.get(await store.put(value)) is value
        references = await store.put_all([value, "text"])
        assert await store.get(references[0]) is value and await store.get(references[1]) == "text"

    asyncio.run(main())


def test_the_size_of_a_value_counts_all_its_tensors():
    inner = TensorDict({"mask": torch.ones(3, dtype=torch.bool)}, [])
    assert nbytes(TensorDict({"latents": torch.zeros(2, 5), "conditioning": inner}, [])) == 2 * 5 * 4 + 3
    assert nbytes(torch.zeros(4, dtype=torch.float64)) == 32
    assert nbytes(np.zeros((2, 3), np.uint8)) == 6
    with pytest.raises(AttributeError):
        nbytes(object())
