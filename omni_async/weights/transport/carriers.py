"""Moves the bytes of a broadcast: through the host's memory, or from device to device.

Whatever accelerator torch knows will do: the library of its collectives is the one that torch has registered for the
device's type, streams and events are torch's own.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed
from torch import Tensor

CarrierName = Literal["cpu", "device"]

_POLL_S = 0.0005
# torch's annotations leave out the parts that are used here.
dist: Any = torch.distributed


class HostCarrier:
    """A broadcast by a group of `gloo` from host memory to host memory."""

    def __init__(self, gloo: Any) -> None:
        self._group = gloo

    def broadcast(self, bucket: Tensor, timeout_s: float) -> None:
        """Copy rank 0's `bucket` (bytes, uint8) into that of every rank. RuntimeError if they do not come in time."""
        self._group.broadcast(bucket, 0).wait(timedelta(seconds=timeout_s))


class DeviceCarrier:
    """A broadcast through the memory of `device`, of every rank its own, on a stream beside the device's other work."""

    def __init__(self, device: torch.device, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self._device = device
        self._root = rank == 0
        # The library's own watchdog may end the process when this has passed; the deadline below is earlier and says
        # why.
        timeout = timedelta(seconds=2 * timeout_s)
        self._group = group_on(device, dist.PrefixStore("weights-device", store), rank, size, timeout)
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self._memory: Tensor | None = None

    def broadcast(self, bucket: Tensor, timeout_s: float) -> None:
        """Copy rank 0's `bucket` (bytes, uint8, on the host) into that of every rank.

        RuntimeError or TimeoutError if they do not come in time."""
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
    """Return the accelerator that this process uses. RuntimeError if there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        raise RuntimeError("this process has no accelerator")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def group_on(device: torch.device, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Make a process group, none of torch's registered ones, of the backend that torch has for the device's type."""
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
    if "Options" not in vars(kind):  # the base class has some that are of no use
        return kind(store, rank, size, timeout)
    options = kind.Options()
    options._timeout = timeout
    return kind(store, rank, size, options)
