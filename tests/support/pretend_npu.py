"""Pretends that this process has Ascend NPUs, without one and without torch-npu: torch's spare device type is renamed
to npu, and its collectives are gloo's. Tensors there have no operators. It cannot be undone: call it in a process of
its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_acc: Any = torch._C._acc


class _Npu:
    """What torch asks of `torch.npu`."""

    def __init__(self, devices: int) -> None:
        self._devices = devices

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return self._devices

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def get_device_name(self, index: int) -> str:
        return f"Ascend 910 ({index})"

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Does nothing: nothing is drawn there."""


@dataclass
class Collectives:
    """The groups that were made of the pretended `hccl`, as (rank, size)."""

    made: list[tuple[int, int]] = field(default_factory=list)

    def make(self, store: Any, rank: int, size: int, timeout: Any) -> Any:
        self.made.append((rank, size))
        return dist.ProcessGroupGloo(store, rank, size, timeout)


def pretend(devices: int) -> Collectives:
    """Gives this process so many NPUs from now on."""

    class Hooks(_acc.PrivateUse1Hooks):  # type: ignore[misc]
        def is_available(self) -> bool:
            return True

        def is_built(self) -> bool:
            return True

        def has_primary_context(self, index: int) -> bool:
            return True

        def device_count(self) -> int:
            return devices

    class Guard(_acc.DeviceGuard):  # type: ignore[misc]
        def type_(self) -> Any:
            return torch._C._autograd.DeviceType.PrivateUse1

    _setup_privateuseone_for_python_backend("npu", backend_module=_Npu(devices), hook=Hooks(), device_guard=Guard())
    collectives = Collectives()
    dist.Backend.register_backend("hccl", collectives.make, devices=["npu"])
    return collectives
