"""Tests weights by broadcast, every rank in a thread of this process: what arrives, and what happens when a rank does
not."""

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from omni_async.config import check
from omni_async.config.schema import Emulation
from omni_async.types import WeightManifest
from omni_async.weights.buckets import unpack
from omni_async.weights.digest import verify
from omni_async.weights.transport.base import Parcel, TransportError, receive, sending
from omni_async.weights.transport.collective import CollectiveReceiver, CollectiveSender, carrier_of
from tests.actors.actor_world import make_config
from tests.weights.conftest import Packed, make_packed

LONG_S, SHORT_S = 30.0, 0.5


class World:
    def __init__(self, engines: int, timeout_s: float = LONG_S) -> None:
        self.sender = CollectiveSender("127.0.0.1", "cpu", timeout_s)
        self.receivers = [CollectiveReceiver(f"rollout-{i}", timeout_s) for i in range(engines)]

    async def connect(self):
        await self.sender.init({str(i): receiver.init for i, receiver in enumerate(self.receivers)})
        return self

    async def carry(self, packed: Packed) -> list[Packed]:
        async with sending(self.sender, *packed) as parcel:
            return list(await asyncio.gather(*(receive(r, packed[0], parcel) for r in self.receivers)))


@pytest.mark.parametrize("engines", [1, 2, 3])
async def test_every_engine_gets_what_was_sent(engines):
    world = await World(engines).connect()
    for version in (1, 2):
        sent = make_packed(version, seed=version)
        arrived = await world.carry(sent)
        assert len(arrived) == engines
        for manifest, buckets in arrived:
            verify(manifest, buckets)
            assert manifest == sent[0]
            assert all(
                torch.equal(a, b) for (_, a), (_, b) in zip(unpack(*sent), unpack(manifest, buckets), strict=True)
            )


async def test_a_version_is_received_into_the_memory_of_the_one_before():
    world = await World(1).connect()
    [(_, first)], [(_, second)] = await world.carry(make_packed(1)), await world.carry(make_packed(2, seed=1))
    assert all(np.shares_memory(a, b) for a, b in zip(first, second, strict=True))


async def test_a_larger_version_gets_larger_memory():
    world = await World(1).connect()
    manifest = WeightManifest(1, "full", "", ())
    for sizes in ([3], [9], [2, 5], [4]):
        [(_, received)] = await world.carry((manifest, [np.full(size, size, np.uint8) for size in sizes]))
        assert [bucket.tolist() for bucket in received] == [[size] * size for size in sizes]


@pytest.fixture
def default_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_trainers_own_group_is_left_alone(default_group):
    async def main() -> None:
        [(manifest, buckets)] = await (await World(1).connect()).carry(make_packed())
        verify(manifest, buckets)

    asyncio.run(main())
    assert dist.get_world_size() == 1
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 1.0


def test_no_default_group_is_made():
    async def main() -> None:
        await (await World(1).connect()).carry(make_packed())

    asyncio.run(main())
    assert not dist.is_initialized()


async def test_an_engine_that_does_not_join_ends_the_others_wait_within_the_timeout():
    world = World(1, SHORT_S)

    async def absent(invitation: Any) -> None:
        """Never joins the group."""

    with pytest.raises(
        TransportError,
        match=r"joining the 3 ranks at 127\.0\.0\.1:\d+ failed on rank [01].*weights\.timeout_s = 0\.5",
    ):
        await world.sender.init({"0": world.receivers[0].init, "1": absent})


async def test_the_refusal_of_an_engine_is_reported_and_not_the_others_waiting_that_follows_from_it():
    async def dead(invitation: Any) -> None:
        raise ConnectionError("the actor died")

    with pytest.raises(ConnectionError, match="the actor died"):
        world = World(1, SHORT_S)
        await world.sender.init({"0": world.receivers[0].init, "1": dead})


async def test_an_engine_that_does_not_receive_ends_everybodys_wait_within_the_timeout():
    world = await World(2, SHORT_S).connect()
    packed = make_packed()
    outcomes: list[BaseException] = []
    with pytest.raises(
        TransportError,
        match=r"the broadcast of version 3 failed on rank 0; a participant is gone or did not come within",
    ):
        async with sending(world.sender, *packed) as parcel:
            outcomes += await asyncio.gather(receive(world.receivers[1], packed[0], parcel), return_exceptions=True)
    assert len(outcomes) == 1  # the tree of the broadcast decides whether this one had its bytes before


async def test_a_trainer_that_does_not_send_ends_the_engines_wait_within_the_timeout():
    world = await World(1, SHORT_S).connect()
    with pytest.raises(TransportError, match=r"the broadcast of version 3 failed on rank 1.*weights\.timeout_s = 0\.5"):
        await receive(world.receivers[0], make_packed()[0], Parcel(None, [4, 4]))


async def test_the_failure_of_an_engine_is_reported_and_not_the_broadcasts_that_follows_from_it():
    world = await World(1, SHORT_S).connect()
    with pytest.raises(LookupError, match="an engine died"):
        async with sending(world.sender, *make_packed()):
            raise LookupError("an engine died")


async def test_nothing_is_carried_before_the_engines_have_joined():
    world, packed = World(1), make_packed()
    with pytest.raises(TransportError, match="version 3 cannot be sent before the engines have joined"):
        await world.carry(packed)
    with pytest.raises(TransportError, match="rollout-0 has not joined the trainer"):
        await receive(world.receivers[0], packed[0], Parcel(None, [1]))


def test_a_run_without_engines_needs_no_group():
    asyncio.run(World(0).sender.init({}))


@pytest.mark.parametrize(
    ("trainer", "rollout", "carrier"),
    [(0, 0, "cpu"), (1, 0, "cpu"), (0, 1, "cpu"), (0.5, 0.5, "cpu"), (1, 1, "device"), (2, 1, "device")],
)
def test_the_device_carries_where_every_rank_has_an_accelerator(trainer, rollout, carrier):
    config = make_config(**{"placement": {"trainer": {"gpus": trainer}, "rollout": {"gpus": rollout}}})
    assert carrier_of(config) == carrier


def test_accelerators_that_are_shared_or_emulated_carry_nothing():
    one_each = {"placement": {"trainer": {"gpus": 1}, "rollout": {"gpus": 1}}}
    config = make_config(**one_each)
    assert carrier_of(config) == "device"
    assert (
        carrier_of(msgspec.structs.replace(config, placement=msgspec.structs.replace(config.placement, colocated=True)))
        == "cpu"
    )
    assert carrier_of(msgspec.structs.replace(config, emulation=Emulation(profile="qwen_image_lora_h800"))) == "cpu"


async def test_the_store_of_the_group_listens_on_its_own_address_alone():
    world = World(1)
    await world.connect()
    listening = {c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert listening and {address.ip for address in listening} == {"127.0.0.1"}


def test_one_process_is_refused_by_the_configuration():
    config = make_config(**{"weights.transport": "collective"})
    local = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, runtime="inprocess"))
    assert check(local) == "weights.transport: 'collective' needs run.runtime: ray; in one process use object_store"
