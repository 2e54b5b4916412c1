"""Tests weights by broadcast, every rank in a thread of this process."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from omni_async.types import WeightManifest
from omni_async.weights.buckets import as_tensor, unpack
from omni_async.weights.digest import verify
from omni_async.weights.transport import collective
from omni_async.weights.transport.base import Transfer, TransportError, receive, sending
from omni_async.weights.transport.collective import (
    CollectiveReceiver,
    CollectiveSender,
    DeviceCarrier,
    Group,
    Membership,
    carrier_of,
    current_device,
    group_on,
)
from tests.support.patience import PATIENCE
from tests.training.training_world import make_config
from tests.weights.conftest import Packed, make_packed

LONG_S, SHORT_S = PATIENCE, 0.5
LONG, SHORT = timedelta(seconds=LONG_S), timedelta(seconds=SHORT_S)
CPU = torch.device("cpu")


class World:
    def __init__(self, engines: int, carrier: Any = "cpu") -> None:
        self.sender = CollectiveSender("127.0.0.1", carrier, LONG_S)
        self.receivers = [CollectiveReceiver(f"rollout-{i}", LONG_S) for i in range(engines)]

    async def connect(self):
        await self.sender.init({str(i): receiver.init for i, receiver in enumerate(self.receivers)})
        return self

    async def connect_and_hurry(self):
        """Connects with time to do so, and then waits for nobody any longer than SHORT_S."""
        await self.connect()
        for participant in (self.sender, *self.receivers):
            group = participant._group
            assert group is not None
            participant._timeout_s = group._timeout_s = SHORT_S
            assert group._gloo.options._timeout == LONG
            group._gloo._set_default_timeout(SHORT)
        return self

    async def carry(self, packed: Packed) -> list[Packed]:
        async with sending(self.sender, *packed) as transfer:
            return list(await asyncio.gather(*(receive(r, packed[0], transfer) for r in self.receivers)))


@pytest.mark.parametrize(("engines", "carrier"), [(1, "cpu"), (2, "cpu"), (3, "cpu"), (2, "device")])
async def test_every_engine_gets_what_was_sent_into_the_memory_of_the_version_before(engines, carrier, monkeypatch):
    monkeypatch.setattr(collective, "current_device", lambda: CPU)
    by_device: list[Any] = []
    broadcast = DeviceCarrier.broadcast
    monkeypatch.setattr(DeviceCarrier, "broadcast", lambda *given: by_device.append(given[0]) or broadcast(*given))
    world = await World(engines, carrier=carrier).connect()
    memory: list[Any] = []
    for version in (1, 2):
        sent = make_packed(version, seed=version)
        arrived = await world.carry(sent)
        assert len(arrived) == engines
        for manifest, buckets in arrived:
            verify(manifest, buckets)
            assert manifest == sent[0]
            pairs = zip(unpack(*sent), unpack(manifest, buckets), strict=True)
            assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)
        memory.append(arrived[0][1])
    assert all(np.shares_memory(a, b) for a, b in zip(*memory, strict=True))
    assert not dist.is_initialized(), "no default group is made"
    listening = {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}
    assert bool(by_device) == (carrier == "device")


async def test_a_larger_version_gets_larger_memory():
    world = await World(1).connect()
    manifest = WeightManifest(1, "full", "", ())
    for sizes in ([3], [9], [2, 5], [4]):
        [(_, received)] = await world.carry((manifest, [np.full(size, size, np.uint8) for size in sizes]))
        assert [bucket.tolist() for bucket in received] == [[size] * size for size in sizes]


async def test_the_trainers_own_group_is_left_alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        verify(*(await (await World(1).connect()).carry(make_packed()))[0])
        assert dist.get_world_size() == 1
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()


async def absent(membership: Any) -> None:
    """Never joins the group."""


async def dead(membership: Any) -> None:
    raise ConnectionError("the actor died")


JOINING = r"joining the 3 ranks at 127\.0\.0\.1:\d+ failed on rank [01].*weights\.timeout_s = 0\.5"


@pytest.mark.parametrize(
    ("join", "error", "said"), [(absent, TransportError, JOINING), (dead, ConnectionError, "the actor died")]
)
async def test_an_engine_that_does_not_join_ends_the_others_wait(join, error, said, monkeypatch):
    serve = CollectiveSender._serve

    def serve_and_hurry(sender: CollectiveSender) -> Any:
        store = serve(sender)
        store.set_timeout(SHORT)
        sender._timeout_s = SHORT_S
        return store

    monkeypatch.setattr(CollectiveSender, "_serve", serve_and_hurry)
    world = World(1)
    world.receivers[0]._timeout_s = SHORT_S
    with pytest.raises(error, match=said):
        await world.sender.init({"0": world.receivers[0].init, "1": join})


async def test_an_engine_that_does_not_receive_ends_everybodys_wait_within_the_timeout():
    world = await World(2).connect_and_hurry()
    packed = make_packed()
    outcomes: list[BaseException] = []
    said = r"the broadcast of version 3 failed on rank 0; a participant is gone or did not come within"
    with pytest.raises(TransportError, match=said):
        async with sending(world.sender, *packed) as transfer:
            outcomes += await asyncio.gather(receive(world.receivers[1], packed[0], transfer), return_exceptions=True)
    assert len(outcomes) == 1  # the tree of the broadcast decides whether this one had its bytes before


async def test_a_trainer_that_does_not_send_ends_the_engines_wait_within_the_timeout():
    world = await World(1).connect_and_hurry()
    with pytest.raises(TransportError, match=r"the broadcast of version 3 failed on rank 1.*weights\.timeout_s = 0\.5"):
        await receive(world.receivers[0], make_packed()[0], Transfer(None, [4, 4]))


async def test_the_failure_of_an_engine_is_reported_and_not_the_broadcasts_that_follows_from_it():
    world = await World(1).connect_and_hurry()
    with pytest.raises(LookupError, match="an engine died"):
        async with sending(world.sender, *make_packed()):
            raise LookupError("an engine died")


async def test_nothing_is_carried_before_the_engines_have_joined():
    world, packed = World(1), make_packed()
    await world.sender.init({})  # a run without engines needs no group
    with pytest.raises(TransportError, match="version 3 cannot be sent before the engines have joined"):
        await world.carry(packed)
    with pytest.raises(TransportError, match="rollout-0 has not joined the trainer"):
        await receive(world.receivers[0], packed[0], Transfer(None, [1]))


SHARED = {"placement.colocated": True}
EMULATED = {"emulation": {"profile": "qwen_image_lora_h800"}}


@pytest.mark.parametrize(
    ("trainer", "rollout", "others", "carrier"),
    [
        *((*gpus, {}, "cpu") for gpus in ((0, 0), (1, 0), (0, 1), (0.5, 0.5))),
        *((*gpus, {}, "device") for gpus in ((1, 1), (2, 1))),
        *((1, 1, others, "cpu") for others in (SHARED, EMULATED)),
    ],
)
def test_the_device_carries_where_every_rank_has_an_accelerator_of_its_own(trainer, rollout, others, carrier):
    gpus = {"placement.trainer.gpus": trainer, "placement.rollout.gpus": rollout}
    assert carrier_of(make_config(**gpus, **others)) == carrier


def on_ranks(size: int, work: Callable[[int], Any]) -> list[Any]:
    """Runs every rank in a thread of its own."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_device_carries_rank_0s_bytes_which_need_not_be_writable_into_buckets_of_any_size(size):
    store = dist.HashStore()
    carriers: list[DeviceCarrier] = []  # kept: rank 0 may be done while another still connects

    def take_part(rank: int) -> list[list[int]]:
        carrier = DeviceCarrier(CPU, store, rank, size, LONG_S)
        carriers.append(carrier)
        arrived = []
        for number, length in enumerate((5, 9, 0, 2), start=1):
            bucket = np.full(length, number if rank == 0 else 0, np.uint8)
            bucket.flags.writeable = rank > 0 or not length
            carrier.broadcast(as_tensor(bucket), LONG_S)
            arrived.append(bucket.tolist())
        return arrived

    assert on_ranks(size, take_part) == [[[1] * 5, [2] * 9, [], [4] * 2]] * size


def test_a_rank_that_does_not_come_ends_the_broadcast_within_the_timeout():
    store, over = dist.HashStore(), threading.Event()

    def take_part(rank: int) -> None:
        carrier = DeviceCarrier(CPU, store, rank, 2, LONG_S)
        if rank == 1:
            over.wait(LONG_S)
            return
        try:
            with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
                for _ in range(2):  # what is small may be on its way before the other takes it
                    carrier.broadcast(torch.zeros(5_000_000, dtype=torch.uint8), SHORT_S)
        finally:
            over.set()

    on_ranks(2, take_part)


def test_the_group_is_of_the_backend_that_torch_has_registered_for_the_device(monkeypatch):
    made: list[tuple[Any, ...]] = []

    class Options:
        _timeout = timedelta(0)

    class BuiltIn:
        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            made.append((rank, size, options._timeout))

    monkeypatch.setattr(BuiltIn, "Options", Options, raising=False)
    monkeypatch.setattr(dist, "ProcessGroupXCCL", BuiltIn, raising=False)
    group = group_on(torch.device("xpu", 0), dist.HashStore(), 1, 3, timedelta(seconds=7))
    assert isinstance(group, BuiltIn)
    assert made == [(1, 3, timedelta(seconds=7))]


async def test_an_engine_that_does_not_come_ends_the_wait_before_the_device_is_entered(monkeypatch):
    monkeypatch.setattr(collective, "current_device", lambda: CPU)
    entered: list[Any] = []
    monkeypatch.setattr(DeviceCarrier, "broadcast", lambda self, bucket, timeout_s: entered.append(bucket))
    world = await World(1, "device").connect_and_hurry()
    with pytest.raises(TransportError, match="the broadcast of version 3 failed on rank 0; a participant is gone"):
        async with asyncio.timeout(LONG_S), sending(world.sender, *make_packed()):
            """No engine receives."""
    assert not entered


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one here")
def test_a_device_that_is_not_there_is_an_error():
    with pytest.raises(RuntimeError, match="this process has no accelerator"):
        current_device()


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.gpu(devices=2))]
)
def test_accelerators_carry_buckets_to_themselves_and_from_one_to_the_other(ranks):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def take_part(rank: int) -> list[list[set[int]]]:
        torch.accelerator.set_device_index(rank)
        own = store if rank == 0 else None
        group = Group(Membership("127.0.0.1", store.port, rank, ranks, "device"), LONG_S, own)
        arrived = []
        for version in (1, 2):
            buckets = [np.full(size, version if rank == 0 else 0, np.uint8) for size in (5_000_000, 3)]
            group.meet(f"version {version}")
            for bucket in buckets:
                group.broadcast(bucket, f"version {version}")
            arrived.append([set(bucket.tolist()) for bucket in buckets])
        return arrived

    assert on_ranks(ranks, take_part) == [[[{1}, {1}], [{2}, {2}]]] * ranks
