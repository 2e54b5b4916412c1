"""Tests that samples of a prompt share its conditioning in the store, and are read back whole."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict

from omni_async.config.held import SHARED_BYTES
from omni_async.roles.trajectories import Stored, Trajectories, read_trajectory
from omni_async.store import LocalStore, nbytes


class Counted(LocalStore):
    def __init__(self) -> None:
        self.put_bytes: list[int] = []

    async def put_all(self, values: Sequence[Any]) -> list[Any]:
        self.put_bytes += map(nbytes, values)
        return await super().put_all(values)

    async def put(self, value: Any) -> Any:
        (reference,) = await self.put_all([value])
        return reference


def trajectory(latents: float, prompt: float, size: int = SHARED_BYTES) -> TensorDict:
    """Makes a trajectory of 16 bytes and of conditioning of `size` bytes, of new tensors."""
    text = TensorDict({"text": torch.full((size // 8,), prompt, dtype=torch.float32)}, batch_size=[])
    text["negative"] = torch.zeros(size // 4, dtype=torch.bfloat16)
    return TensorDict({"latents": torch.full((4,), latents, dtype=torch.float32), "conditioning": text}, batch_size=[])


def test_equal_conditioning_is_stored_once_by_a_process() -> None:
    store = Counted()
    made = [trajectory(0, 1.0), trajectory(1, 1.0), trajectory(2, 2.0)]
    calls = TensorDict({"call0": trajectory(3, 1.0), "call1": trajectory(4, 3.0)}, batch_size=[])

    async def both() -> tuple[list[Stored], list[Any]]:
        stored = Trajectories("rollout-0", store)
        found = await stored.put_all(made[:2]) + await stored.put_all([made[2], calls])
        return found, [await read_trajectory(store, one.reference) for one in found]

    found, read = asyncio.run(both())
    assert sorted(store.put_bytes) == [16, 16, 16, 32, *[SHARED_BYTES] * 3]
    assert [one.nbytes for one in found] == [16, 16, 16, 32]
    names = [[name for name, _ in one.shared] for one in found]
    assert names[0] == names[1] != names[2] and names[3][0] == names[0][0] and len(names[3]) == 2
    for whole, wanted in zip(read, [*made, calls], strict=True):
        assert whole.to_dict().keys() == wanted.to_dict().keys() and (whole == wanted).all()
    assert read[0]["conditioning", "text"].data_ptr() == read[1]["conditioning", "text"].data_ptr()


def test_small_conditioning_stays_with_its_sample() -> None:
    store = Counted()
    made = [trajectory(0, 1.0, size=SHARED_BYTES - 8) for _ in range(2)]
    found = asyncio.run(Trajectories("rollout-0", store).put_all(made))
    assert store.put_bytes == [one.nbytes for one in found] == [SHARED_BYTES + 8] * 2
    assert all(one.reference is each and not one.shared for one, each in zip(found, made, strict=True))
