"""Tests device, groups, mesh and carrier of pretended Ascend NPUs; no Ascend has run any of it."""

import os
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from omni_async.accelerator import require_accelerator
from omni_async.commands.bench.result import describe_machine
from omni_async.training.device import collective_backend, init_process_group, rank_device
from omni_async.weights.transport.collective import DeviceCarrier, Group, Membership, current_device
from omni_async.weights.transport.tcp_store import interface_towards, serve_store
from tests.support.patience import PATIENCE
from tests.support.pretend_npu import pretend
from tests.support.ranks import on_ranks

RANKS = 2


def work(rank: int, ranks: int, init_method: str) -> dict[str, Any]:
    collectives = pretend(RANKS)
    device = rank_device(rank)
    found: dict[str, Any] = {
        "device": str(device),
        "current": current_device().type,  # which one, the pretended guard does not keep
        "asked for": str(require_accelerator("placement.trainer.gpus", 1)),
        "backend": collective_backend(device),
        "names": describe_machine(with_gpus=True).gpus,
    }
    ports = dist.FileStore(urlsplit(init_method).path, ranks)
    served = [serve_store("127.0.0.1", PATIENCE) for _ in range(2)] if rank == 0 else []
    for name, store in zip(("ranks", "weights"), served, strict=False):
        ports.set(name, str(store.port))
    init_process_group(rank, ranks, f"tcp://127.0.0.1:{int(ports.get('ranks'))}", PATIENCE, device)
    mesh = init_device_mesh(device.type, (RANKS,))
    found["interface"] = os.environ["GLOO_SOCKET_IFNAME"]
    found["mesh"] = [mesh.device_type, mesh.size(), mesh.get_local_rank()]
    total = torch.ones(1)
    dist.all_reduce(total)
    found["sum on the host"] = total.item()
    found["groups"] = len(collectives.made)
    membership = Membership("127.0.0.1", int(ports.get("weights")), rank, RANKS, "device")
    group = Group(membership, PATIENCE, served[1] if rank == 0 else None)
    group.meet("a test")
    found["carrier"] = type(group._carrier).__name__
    found["groups of the carrier"] = collectives.made[found["groups"] :]
    dist.all_reduce(total)  # until both are done: the stores are rank 0's
    return found


def test_ranks_on_npus_find_their_device_their_group_and_their_carrier():
    for rank, found in enumerate(on_ranks(RANKS, work)):
        assert found.pop("groups") >= 1
        assert found == {
            "device": f"npu:{rank}",
            "current": "npu",
            "asked for": "npu",
            "backend": "cpu:gloo,npu:hccl",
            "names": ("Ascend 910 (0)", "Ascend 910 (1)"),
            "interface": interface_towards("127.0.0.1", 1),
            "mesh": ["npu", RANKS, rank],
            "sum on the host": 2.0,
            "carrier": DeviceCarrier.__name__,
            "groups of the carrier": [(rank, RANKS)],
        }
    current = torch.accelerator.current_accelerator()
    assert current is None or current.type != "npu", "pretending stays in its process"
