"""Tests what the emulated rank fetches and exports. tests/simulation/test_real_roles.py holds whole runs to the
simulator's times."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from omni_async.performance.emulation import SEED_BYTES, random_bytes, seed_of, with_seed
from omni_async.performance.profile import Payload
from omni_async.roles.emulated import EmulatedRank
from omni_async.store import LocalStore
from omni_async.types import TrainGroup
from omni_async.weights.digest import verify
from tests.roles.actor_world import make_config
from tests.simulation.simulation_world import make_profile

pytestmark = pytest.mark.virtual_time
PROFILE = replace(
    make_profile(proximal=(0.0, 0.25), train=(0.0, 1.0), step=2.0, export=3.0),
    payload=Payload(trajectory=64, media=32, weights=2_500_000),
)


class Store(LocalStore):
    """A store that takes time to fetch, and records what was fetched."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.fetched: list[Any] = []

    async def get(self, reference: Any) -> Any:
        await asyncio.sleep(self.seconds)
        self.fetched.append(reference)
        return reference


async def seconds(work: Coroutine[Any, Any, Any]) -> float:
    before = asyncio.get_running_loop().time()
    await work
    return asyncio.get_running_loop().time() - before


async def test_passes_take_the_time_of_a_share_fetch_included():
    group, trajectories, store = TrainGroup(3, 0, None, (), (), ()), [np.zeros(64, np.uint8)] * 4, Store(seconds=0.3)
    rank = EmulatedRank(make_config(**{"trainer.workers": 2}), PROFILE, store)
    await rank.setup(None, None)
    assert await seconds(rank.fetch(3, trajectories, 0)) == pytest.approx(0.3)
    assert await seconds(rank.accumulate(group, 1.0)) == pytest.approx(2.0 - 0.3)
    await rank.fetch(3, trajectories, 0)
    assert await seconds(rank.recompute_proximal(group)) == pytest.approx(0.5 - 0.3)
    assert await seconds(rank.accumulate(group, 1.0)) == pytest.approx(2.0)
    assert await seconds(rank.step(1.0)) == pytest.approx(2.0)
    assert len(store.fetched) == 8
    with pytest.raises(RuntimeError, match="group 3: a trajectory of 63 bytes arrived, expected 64"):
        await rank.fetch(3, [np.zeros(63, np.uint8)], 0)


async def test_versions_are_buckets_of_different_bytes():
    rank = EmulatedRank(make_config(**{"weights.bucket_mb": 1}), PROFILE, Store())
    began = asyncio.get_running_loop().time()
    first, second = [await rank.export(version) for version in (0, 1)]
    assert asyncio.get_running_loop().time() - began == pytest.approx(2 * 3.0)
    manifests = [first.manifest(), second.manifest()]
    for version, snapshot in enumerate((first, second)):
        assert (manifests[version].version, manifests[version].nbytes) == (version, 2_500_000)
        assert [len(bucket) for bucket in snapshot.buckets] == [2**20, 2**20, 2_500_000 - 2**21]
        verify(manifests[version], snapshot.buckets)
    assert not np.shares_memory(first.buckets[0], second.buckets[0])
    first.release()
    third = await rank.export(2)
    assert third.buckets is first.buckets
    assert len({one.digest for one in (*manifests, third.manifest())}) == 3


def test_media_carry_a_seed():
    media = random_bytes(SEED_BYTES, 0)
    assert [seed_of(with_seed(media, seed)) for seed in (0, 7)] == [0, 7]
    with pytest.raises(ValueError, match="emulated media has at least 8 bytes, got 7"):
        seed_of(media[:-1])
