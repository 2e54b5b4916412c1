"""Samples the memory and the utilisation of the accelerators that a process sees.

NVML (Nvidia) answers without using a device. Without its Python module, or for other accelerators, torch is asked about
a device that this process already uses, because a first use would take memory there. A device that cannot be read is
left out; nothing here raises.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import msgspec

from omni_async.accelerator import nvidia_ids, visible_devices

_INTERVAL_S = 2.0
_KEPT = 15  # samples of the utilisation: those of 30 s
# nvidia-ml-py, and Ray's copy of it; the copy counts only in a process that uses Ray.
_NVML = "pynvml"
_RAYS_NVML = "ray._private.thirdparty.pynvml"


class Device(msgspec.Struct, frozen=True):
    """An accelerator.

    id: distinguishes it on its machine.
    name: the model's, for people.
    memory_bytes: in use by all processes, of `total_bytes`.
    utilisation: share of the last 30 seconds in which it computed; None if the driver does not report it."""

    id: str
    name: str
    memory_bytes: int
    total_bytes: int
    utilisation: float | None


class UsedDevice(msgspec.Struct, frozen=True):
    """An accelerator of a run. `number`: by first use in this attempt, from 0. `workers`: its users."""

    number: int
    node: str
    workers: list[str]
    device: Device


class DeviceSampler:
    """A daemon thread that reads this process's accelerators every two seconds, from `start` to `stop`.

    `devices`: as last read; empty before that, and if none can be read."""

    def __init__(self) -> None:
        self._stopping = threading.Event()
        self._busy: dict[str, deque[float]] = defaultdict(partial(deque, maxlen=_KEPT))
        self.devices: list[Device] = []

    def start(self) -> None:
        threading.Thread(target=self._sample_until_stopped, name="device-sampler", daemon=True).start()

    def stop(self) -> None:
        """End the thread after its current reading; a driver that hangs is not waited for."""
        self._stopping.set()

    def _sample_until_stopped(self) -> None:
        read: Callable[[], list[Device]] | None = None
        while not self._stopping.is_set():
            try:
                read = read or _reader()
                self.devices = [*map(self._averaged, read())] if read else []
            except Exception:  # noqa: BLE001 (the driver's errors are many, and none of them may end a run)
                self.devices = []
            self._stopping.wait(_INTERVAL_S)

    def _averaged(self, one: Device) -> Device:
        if one.utilisation is None:
            return one
        busy = self._busy[one.id]
        busy.append(one.utilisation)
        return msgspec.structs.replace(one, utilisation=sum(busy) / len(busy))


class RunDevices:
    """Numbers the accelerators of a run."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], int] = {}

    def of(self, sampled: Iterable[tuple[str, str, Iterable[Device]]]) -> list[UsedDevice]:
        """Return the devices by number. `sampled`: worker, node, and the devices that the worker sees."""
        found: dict[tuple[str, str], Device] = {}
        workers: dict[tuple[str, str], list[str]] = defaultdict(list)
        for worker, node, devices in sampled:
            for one in devices:
                key = node, one.id
                self._numbers.setdefault(key, len(self._numbers))
                found[key] = one
                workers[key].append(worker)
        used = [UsedDevice(self._numbers[key], key[0], workers[key], one) for key, one in found.items()]
        return sorted(used, key=lambda one: one.number)


def device_metrics(used: Iterable[UsedDevice]) -> dict[str, float]:
    """Return the numbers of the devices by metric name."""
    found: dict[str, float] = {}
    for one in used:
        found[f"device/{one.number}/memory_bytes"] = one.device.memory_bytes
        if one.device.utilisation is not None:
            found[f"device/{one.number}/utilisation"] = one.device.utilisation
    return found


# ---- readers ---------------------------------------------------------------------------------------------------------


def _reader() -> Callable[[], list[Device]] | None:
    """Return a function that reads the devices, or None if none can be read now."""
    for find in (_nvml_reader, _torch_reader):
        with contextlib.suppress(Exception):
            if (read := find(os.environ)) is not None:
                return read
    return None


def _nvml_reader(environment: Mapping[str, str]) -> Callable[[], list[Device]] | None:
    ids = nvidia_ids(environment)
    if ids == []:
        return None
    nvml = _nvml()
    nvml.nvmlInit()
    ids = [str(index) for index in range(nvml.nvmlDeviceGetCount())] if ids is None else ids
    # CUDA names a device by its number, or by its UUID.
    handles = [
        nvml.nvmlDeviceGetHandleByIndex(int(one)) if one.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(one)
        for one in ids
    ]
    named = [
        (handle, _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))) for handle in handles
    ]

    def read_one(handle: Any, uuid: str, name: str) -> Device:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        utilisation = None
        with contextlib.suppress(Exception):  # a part of a device (MIG) has none
            utilisation = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        return Device(uuid, name, int(memory.used), int(memory.total), utilisation)

    return lambda: [read_one(*one) for one in named]


def _nvml() -> Any:
    try:
        return import_module(_NVML)
    except ImportError:
        if "ray" not in sys.modules:
            raise
        return import_module(_RAYS_NVML)


def _text(value: str | bytes) -> str:
    """Return a text of NVML, which earlier versions of its module return as bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _torch_reader(environment: Mapping[str, str]) -> Callable[[], list[Device]] | None:
    """Return a reader of the first accelerator, if this process has begun to use it."""
    torch = sys.modules.get("torch")
    accelerator = torch and torch.accelerator.current_accelerator(check_available=True)
    if torch is None or accelerator is None:
        return None
    backend = getattr(torch, accelerator.type)
    if not backend.is_initialized():
        return None
    _, ids = visible_devices(environment)
    uuid, name = ids[0], backend.get_device_name(0)

    def read() -> list[Device]:
        free, total = backend.mem_get_info(0)
        utilisation = None
        with contextlib.suppress(Exception):  # torch needs another package for it
            utilisation = backend.utilization(0) / 100
        return [Device(uuid, name, total - free, total, utilisation)]

    return read
