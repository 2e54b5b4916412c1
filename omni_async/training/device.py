"""Chooses the device of a trainer rank and the matching collective backend."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from omni_async.config.layout import ParallelLayout
from omni_async.weights.transport.tcp_store import interface_towards, join_store

# Names the interface of every gloo group of the process.
_INTERFACE = "GLOO_SOCKET_IFNAME"


def rank_device(rank: int) -> torch.device:
    """Return this rank's accelerator (rank modulo the visible devices), made current; the CPU without accelerators."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    expand_segments()
    index = rank % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)


def expand_segments() -> None:
    """Let the device's allocator grow its segments, unless the environment configures it.

    Texts of different lengths need blocks of different sizes for every group, which fragments segments of fixed sizes.
    Call it before the first allocation."""
    if not any(name.startswith("PYTORCH_") and name.endswith("ALLOC_CONF") for name in os.environ):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def collective_backend(device: torch.device) -> str:
    """Return a `torch.distributed` backend string for `device`: the registered backend of its type.

    Gloo is always included, for metrics and checkpoint plans on the CPU."""
    if device.type == "cpu":
        return "cpu:gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"


def init_process_group(rank: int, world: int, init_method: str, timeout: float, device: torch.device) -> None:
    """Join the trainer's process group. Returns when all ranks have called it.

    On gloo, ranks connect through the interface towards the store, unless GLOO_SOCKET_IFNAME names another. Gloo's
    default is the address of the host's name, on Debian and Ubuntu 127.0.1.1, which no other machine can reach.

    Args:
        rank: this rank.
        world: the number of ranks.
        init_method: torch's `file:///...`, or `tcp://host:port` of the store that `tcp_store.serve_store` serves.
        timeout: seconds for every collective, so that ranks fail instead of hanging when another rank is lost.
        device: this rank's device."""
    where: dict[str, Any] = {"init_method": init_method}
    address = urlsplit(init_method)
    if address.scheme == "tcp":  # torch's rank 0 would open a second store at this port
        assert address.hostname is not None and address.port is not None
        where = {"store": join_store(address.hostname, address.port, timeout)}
        if not os.environ.get(_INTERFACE) and (found := interface_towards(address.hostname, address.port)):
            os.environ[_INTERFACE] = found
    dist.init_process_group(
        collective_backend(device),
        **where,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
        device_id=None if device.type == "cpu" else device,
    )


def init_lone_process_group(device: torch.device) -> None:
    """Create a process group of one rank, without an address: FSDP2 requires a group even for a single rank."""
    dist.init_process_group(collective_backend(device), store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor on `device`, without waiting for the device's earlier work.

    A copy from pageable memory would wait for all earlier work."""
    if device.type == "cpu":
        return tensor
    if torch.accelerator.is_available():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def largest_over_ranks(values: list[int]) -> list[int]:
    """Return the largest value over all ranks at each position. Collective for several ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    found: list[int] = tensor.tolist()
    return found


def sum_over_ranks(value: float) -> float:
    """Return the sum of every rank's value. Collective for several ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.item()


def sum_of_rows(layout: ParallelLayout, sums: Tensor) -> Tensor:
    """Return the total over all ranks of `sums` (on the CPU), each rank's sums over its own rows.

    Ranks that share a sequence have the same rows, which count once. Collective for several ranks."""
    if layout.world_size == 1:
        return sums
    total = sums.clone() if layout.leads_sequence else torch.zeros_like(sums)
    dist.all_reduce(total)
    return total
