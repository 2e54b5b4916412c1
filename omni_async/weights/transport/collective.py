"""Broadcasts weights through a separate torch.distributed group.

Trainer rank 0 is the root, and every engine is a rank.

The group is not among torch's registered ones, in particular not the trainer's: it uses a TCP store that the sender
serves. It is formed when every engine has started, so no engine delays another's loading. The sender gives each rank
its membership, all ranks register at the store, and rank 0 decides there whether the group is complete. If a rank's
call failed, it is known to be gone, and all others fail at once. Every step has the timeout, and a participant that is
missing, or leaves, ends the others' wait with an error. All calls that wait run in their own thread.

Bytes go by gloo through the host's memory, or by the accelerators' own library if trainer and engines have an
accelerator each. In the latter case gloo first makes sure that all ranks are there, because the library's broadcast
could wait forever. Any accelerator of torch will do: the library of its collectives is registered in torch for the
device's type, and streams and events are torch's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from omni_async.aio.threads import DaemonThread, in_daemon_thread
from omni_async.config import Config
from omni_async.types import WeightManifest
from omni_async.weights.buckets import as_tensor
from omni_async.weights.digest import Bucket
from omni_async.weights.transport.base import Join, TransportError
from omni_async.weights.transport.tcp_store import address_towards, join_store, serve_store

T = TypeVar("T")
CarrierName = Literal["cpu", "device"]

_POLL_S = 0.0005

# Keys and values at the store for the check, before the ranks form the group, that all of them are there.
_ALL, _ARRIVAL, _HERE, _GONE = "all", "arrival/{}", b"here", b"gone"
# torch's annotations leave out the parts that are used here.
dist: Any = torch.distributed


def carrier_of(config: Config) -> CarrierName:
    """Choose "device" if every rank has a whole accelerator, shared with no other, and "cpu" otherwise."""
    placement = config.placement
    if config.emulation is not None or placement.colocated:
        return "cpu"
    return "device" if min(placement.trainer.gpus, placement.rollout.gpus) >= 1 else "cpu"


@dataclass(frozen=True)
class Membership:
    """One member of the group: where the group forms, its size, and the rank of the member."""

    host: str
    port: int
    rank: int
    size: int
    carrier: CarrierName


class CollectiveSender:
    """The sender, rank 0. `host` is this machine's address for the engines' machines."""

    one_by_one = False

    def __init__(self, host: str, carrier: CarrierName, timeout_s: float) -> None:
        self._host = host
        self._carrier: CarrierName = carrier
        self._timeout_s = timeout_s
        self._thread = _Thread()
        self._group: Group | None = None
        self._waiting: list[asyncio.Future[None]] = []

    async def init(self, engines: Mapping[str, Join]) -> None:
        if not engines:
            return
        self._thread = _Thread()  # a call stuck in a group that lost a rank keeps the old thread until its time-out
        store = await self._thread.submit(self._serve)
        mine = Membership(self._host, store.port, 0, len(engines) + 1, self._carrier)
        forming = self._thread.submit(lambda: Group(mine, self._timeout_s, store))
        joining = [self._joined(join, replace(mine, rank=rank)) for rank, join in enumerate(engines.values(), start=1)]
        # Wait until all have answered: then no rank still waits in this attempt when the next begins, and the caller
        # knows which one failed.
        formed, *joined = await asyncio.gather(forming, *joining, return_exceptions=True)
        failures = [outcome for outcome in (*joined, formed) if isinstance(outcome, BaseException)]
        for failure in sorted(failures, key=lambda failure: isinstance(failure, TransportError)):
            raise failure  # a rank's own error comes before the time-outs of the ranks that waited for it
        self._group = forming.result()

    async def _joined(self, join: Join, membership: Membership) -> None:
        """Return when this participant is in the group. If its call fails, the others are notified at once."""
        try:
            await join(membership)
        except BaseException:
            await in_daemon_thread(_report_gone, membership, self._timeout_s)
            raise

    def _serve(self) -> Any:
        with _reporting(f"serving the group's store on {self._host}", 0, self._timeout_s):
            return serve_store(self._host, self._timeout_s)

    async def start(self, manifest: WeightManifest, sizes: Sequence[int]) -> None:
        if self._group is None:
            raise TransportError(
                f"weights.transport: collective: version {manifest.version} cannot be sent before the engines have"
                " joined"
            )
        group, self._action = self._group, f"the broadcast of version {manifest.version}"
        self._waiting = [self._thread.submit(partial(group.meet, self._action))]

    async def update(self, bucket: Bucket, reference: Any | None) -> int:
        """Return the number of bytes to receive at once, because the broadcast waits for the engines."""
        assert self._group is not None
        self._waiting.append(self._thread.submit(partial(self._group.broadcast, bucket, self._action)))
        return len(bucket)

    async def finish(self, delivered: bool) -> None:
        waiting, self._waiting = self._waiting, []
        for broadcast in waiting:
            broadcast.add_done_callback(_forget)  # if one fails, so do those after it; the first failure is reported
        if delivered:
            for broadcast in waiting:
                await broadcast


class CollectiveReceiver:
    """The receiver of the engine called `name`."""

    def __init__(self, name: str, timeout_s: float) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._thread = _Thread()
        self._group: Group | None = None
        self._memory: list[Bucket] = []

    async def init(self, membership: Membership) -> None:
        self._thread, self._memory = _Thread(), []  # a broadcast stuck in the last group keeps the old ones
        self._group = await self._thread.submit(lambda: Group(membership, self._timeout_s))

    async def start(self, manifest: WeightManifest, start: None) -> None:
        if self._group is None:
            raise TransportError(f"weights.transport: collective: {self._name} has not joined the trainer")
        self._manifest, self._received = manifest, list[Bucket]()
        self._action = f"the broadcast of version {manifest.version}"
        await self._thread.submit(partial(self._group.meet, self._action))

    async def update(self, bucket: int) -> None:
        assert self._group is not None
        memory = self._room(len(self._received), bucket)
        await self._thread.submit(partial(self._group.broadcast, memory, self._action))
        self._received.append(memory)

    async def finish(self) -> tuple[WeightManifest, list[Bucket]]:
        return self._manifest, self._received

    def _room(self, number: int, size: int) -> Bucket:
        """Return memory for a bucket, the last version's if it is large enough: its pages are mapped already."""
        if number == len(self._memory):
            self._memory.append(np.empty(size, np.uint8))
        elif len(self._memory[number]) < size:
            self._memory[number] = np.empty(size, np.uint8)
        return self._memory[number][:size]


class Group:
    """A process group of all ranks, formed at once; TransportError if one does not arrive within `timeout_s`."""

    def __init__(self, membership: Membership, timeout_s: float, store: Any | None = None) -> None:
        self._membership = membership
        self._timeout_s = timeout_s
        self._broken: TransportError | None = None
        timeout = timedelta(seconds=timeout_s)
        host, port = membership.host, membership.port
        with _reporting(f"joining the {membership.size} ranks at {host}:{port}", membership.rank, timeout_s):
            self._store = store or join_store(host, port, timeout_s)
            _await_all_ranks(self._store, membership)
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timeout
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(host, port))]
            self._gloo = dist.ProcessGroupGloo(
                dist.PrefixStore("weights", self._store), membership.rank, membership.size, options
            )
            self._carrier: DeviceCarrier | None = None
            if membership.carrier == "device":
                rank, size = membership.rank, membership.size
                self._carrier = DeviceCarrier(current_device(), self._store, rank, size, timeout_s)

    def meet(self, action: str) -> None:
        """Return when all ranks are there, if the carrier needs that. TransportError, with `action`, if one is late."""
        if self._carrier is not None:
            with self._taking_part(action):
                self._gloo.barrier().wait(timedelta(seconds=self._timeout_s))

    def broadcast(self, bucket: Bucket, action: str) -> None:
        """Copy rank 0's bytes into every rank's `bucket`.

        TransportError, naming `action`, if not all take part in time."""
        with self._taking_part(action):
            if self._carrier is not None:
                self._carrier.broadcast(as_tensor(bucket), self._timeout_s)
            else:
                self._gloo.broadcast(as_tensor(bucket), 0).wait(timedelta(seconds=self._timeout_s))

    @contextlib.contextmanager
    def _taking_part(self, action: str) -> Iterator[None]:
        """After a rank is lost, let the group fail at once, not after another time-out for every bucket."""
        if self._broken is not None:
            raise TransportError(str(self._broken))
        try:
            with _reporting(action, self._membership.rank, self._timeout_s):
                yield
        except TransportError as error:
            self._broken = error
            raise


def _await_all_ranks(store: Any, membership: Membership) -> None:
    """Return once all ranks have registered. RuntimeError, on every rank, as soon as one is known to be gone."""
    if membership.rank > 0:
        store.set(_ARRIVAL.format(membership.rank), _HERE)
    else:
        arrivals = [_ARRIVAL.format(rank) for rank in range(1, membership.size)]
        store.wait(arrivals)
        store.set(_ALL, _HERE if all(store.get(arrival) == _HERE for arrival in arrivals) else _GONE)
    if store.get(_ALL) == _GONE:
        raise RuntimeError("a participant failed before the group was formed")


def _report_gone(membership: Membership, timeout_s: float) -> None:
    """Report at the store that a participant's call failed.

    If it registered before that, the others wait for the group's own time-out."""
    with contextlib.suppress(RuntimeError, OSError):  # without the store no rank waits there any more
        join_store(membership.host, membership.port, timeout_s).set(_ARRIVAL.format(membership.rank), _GONE)


@contextlib.contextmanager
def _reporting(action: str, rank: int, timeout_s: float) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:  # torch's distributed errors are RuntimeErrors, time-outs are OSErrors
        reason = str(error).partition("\n")[0]
        raise TransportError(
            f"weights.transport: collective: {action} failed on rank {rank}; a participant is gone or did not come"
            f" within weights.timeout_s = {timeout_s:g} ({reason})"
        ) from error


class _Thread:
    """A thread that runs calls one at a time, in order."""

    def __init__(self) -> None:
        self._executor = DaemonThread("weights")

    def submit(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._executor, work)


def _forget(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()


class DeviceCarrier:
    """A broadcast through each rank's memory of `device`, on a stream concurrent with the device's other work."""

    def __init__(self, device: torch.device, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self._device = device
        self._root = rank == 0
        # The library's own watchdog may end the process when this has passed; the deadline below is earlier and gives
        # the reason.
        timeout = timedelta(seconds=2 * timeout_s)
        self._group = group_on(device, dist.PrefixStore("weights-device", store), rank, size, timeout)
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._memory: Tensor | None = None

    def broadcast(self, bucket: Tensor, timeout_s: float) -> None:
        """Copy rank 0's `bucket` (bytes, uint8, on the host) into every rank's.

        RuntimeError or TimeoutError if they do not arrive in time."""
        if self._stream is None:
            self._carry(bucket).wait(timedelta(seconds=timeout_s))
            self._arrive(bucket)
            return
        with self._stream:
            self._carry(bucket).wait()  # the stream waits, not this thread
            # On the root too: its next copy would wait for this one, without a deadline.
            self._await(self._stream, time.monotonic() + timeout_s)
            self._arrive(bucket)
            self._stream.synchronize()

    def _carry(self, bucket: Tensor) -> Any:
        if self._memory is None or len(self._memory) < len(bucket):
            self._memory = torch.empty(len(bucket), dtype=torch.uint8, device=self._device)
        there = self._memory[: len(bucket)]
        if self._root:
            there.copy_(bucket)
        return self._group.broadcast(there, 0)

    def _arrive(self, bucket: Tensor) -> None:
        if not self._root and self._memory is not None:
            bucket.copy_(self._memory[: len(bucket)])

    def _await(self, stream: torch.Stream, deadline: float) -> None:
        done = torch.Event(self._device)
        done.record(stream)
        while not done.query():
            if time.monotonic() > deadline:
                self._group.abort()
                raise TimeoutError(f"the broadcast on {self._device} did not finish")
            time.sleep(_POLL_S)


def current_device() -> torch.device:
    """Return the accelerator that this process uses. RuntimeError without an accelerator."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        raise RuntimeError("this process has no accelerator")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def group_on(device: torch.device, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Make an unregistered process group of the backend that torch has for the device's type.

    Args:
        device: the group broadcasts its memory.
        store: of torch.distributed, through which the ranks find each other.
        rank: this process's; 0 is the sender.
        size: the number of ranks.
        timeout: after which the backend itself gives a call up."""
    name = dist.get_default_backend_for_device(device.type)
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None:
        built_in = next(kind for kind in dir(dist) if kind.lower() == f"processgroup{name}")
        return _built_in_group(getattr(dist, built_in), store, rank, size, timeout)
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    options = dist.distributed_c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size, options.timeout = store, rank, size, timeout
    options.group_id, options.global_ranks_in_group = "weights", list(range(size))
    return plugin.creator_fn(options, None)


def _built_in_group(kind: Any, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    if "Options" not in vars(kind):  # the base class has unrelated options
        return kind(store, rank, size, timeout)
    options = kind.Options()
    options._timeout = timeout
    return kind(store, rank, size, options)
