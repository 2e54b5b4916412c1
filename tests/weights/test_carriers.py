"""Tests carriers of a broadcast: that of a device with the CPU as the device, whose collectives are gloo's; and with
accelerators where there are some."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from omni_async.weights.buckets import as_tensor
from omni_async.weights.digest import Bucket, verify
from omni_async.weights.transport import collective
from omni_async.weights.transport.base import TransportError, receive, sending
from omni_async.weights.transport.collective import (
    CollectiveReceiver,
    CollectiveSender,
    DeviceCarrier,
    Group,
    Invitation,
    current_device,
    group_on,
)
from tests.weights.conftest import make_packed

CPU = torch.device("cpu")
LONG_S, SHORT_S = 60.0, 0.5


def on_ranks(size: int, work: Callable[[int], Any]) -> list[Any]:
    """Runs every rank in a thread of its own."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, range(size)))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_device_carries_rank_0s_bytes_into_buckets_of_any_size(size):
    store = dist.HashStore()

    def take_part(rank: int) -> list[list[int]]:
        carrier = DeviceCarrier(CPU, store, rank, size, LONG_S)
        arrived = []
        for number, length in enumerate((5, 9, 0, 2)):
            bucket = np.full(length, number + 1 if rank == 0 else 0, np.uint8)
            carrier.broadcast(as_tensor(bucket), LONG_S)
            arrived.append(bucket.tolist())
        return arrived

    assert on_ranks(size, take_part) == [[[1] * 5, [2] * 9, [], [4] * 2]] * size


def test_what_rank_0_sends_need_not_be_writable():
    store, sent = dist.HashStore(), np.frombuffer(b"abc", np.uint8)

    def take_part(rank: int) -> bytes:
        bucket = sent if rank == 0 else np.zeros(3, np.uint8)
        DeviceCarrier(CPU, store, rank, 2, LONG_S).broadcast(as_tensor(bucket), LONG_S)
        return bucket.tobytes()

    assert on_ranks(2, take_part) == [b"abc"] * 2


def test_a_rank_that_does_not_come_ends_the_broadcast_within_the_timeout():
    store, over = dist.HashStore(), threading.Event()

    def take_part(rank: int) -> None:
        carrier = DeviceCarrier(CPU, store, rank, 2, SHORT_S)
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


async def test_engines_get_what_was_sent_by_way_of_the_device(monkeypatch):
    monkeypatch.setattr(collective, "current_device", lambda: CPU)
    sender = CollectiveSender("127.0.0.1", "device", LONG_S)
    receivers = [CollectiveReceiver(f"rollout-{i}", LONG_S) for i in range(2)]
    await sender.init({str(i): receiver.init for i, receiver in enumerate(receivers)})
    for version in (3, 4):
        packed = make_packed(version, seed=version)
        async with sending(sender, *packed) as parcel:
            arrived = await asyncio.gather(*(receive(r, packed[0], parcel) for r in receivers))
        for manifest, buckets in arrived:
            verify(manifest, buckets)


def test_an_engine_that_does_not_come_ends_the_wait_before_the_device_is_entered(monkeypatch):
    monkeypatch.setattr(collective, "current_device", lambda: CPU)
    entered: list[Any] = []
    monkeypatch.setattr(DeviceCarrier, "broadcast", lambda self, bucket, timeout_s: entered.append(bucket))

    async def main() -> None:
        sender, receiver = CollectiveSender("127.0.0.1", "device", SHORT_S), CollectiveReceiver("rollout-0", SHORT_S)
        await sender.init({"0": receiver.init})
        with pytest.raises(TransportError, match="the broadcast of version 3 failed on rank 0; a participant is gone"):
            async with sending(sender, *make_packed()):
                """No engine receives."""

    asyncio.run(asyncio.wait_for(main(), LONG_S))
    assert not entered


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one here")
def test_a_device_that_is_not_there_is_an_error():
    with pytest.raises(RuntimeError, match="this process has no accelerator"):
        current_device()


def through_devices(ranks: int) -> None:
    """Broadcasts two versions from the device of rank 0 to those of the others."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sizes = (5_000_000, 3)

    def take_part(rank: int) -> list[list[set[int]]]:
        torch.accelerator.set_device_index(rank)
        own = store if rank == 0 else None
        group = Group(Invitation("127.0.0.1", store.port, rank, ranks, "device"), LONG_S, own)
        arrived = []
        for version in (1, 2):
            buckets: list[Bucket] = [np.full(size, version if rank == 0 else 0, np.uint8) for size in sizes]
            group.meet(f"version {version}")
            for bucket in buckets:
                group.broadcast(bucket, f"version {version}")
            arrived.append([set(bucket.tolist()) for bucket in buckets])
        return arrived

    assert on_ranks(ranks, take_part) == [[[{1}, {1}], [{2}, {2}]]] * ranks


@pytest.mark.gpu
def test_the_root_carries_buckets_by_way_of_an_accelerators_memory():
    through_devices(1)


@pytest.mark.gpu(devices=2)
def test_accelerators_carry_buckets_from_one_to_the_other():
    through_devices(2)
