"""Tests the sampling of accelerators, with a small NVML of this file and without any."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from omni_async.records.write import devices
from omni_async.records.write.catalogue import find
from omni_async.records.write.devices import Device, DeviceSampler, RunDevices, device_metrics
from tests.support.patience import wait_for

GIB = 2**30


class Nvml(ModuleType):
    """The functions of NVML that are used, over `gpus` devices: device n uses n + 1 of 80 GiB, and 20 % times n."""

    def __init__(self, gpus: int) -> None:
        super().__init__("pynvml")
        self.gpus = gpus
        self.reads = 0
        self.fails: Exception | None = None

    def nvmlInit(self) -> None:
        if self.fails is not None:
            raise self.fails

    def nvmlDeviceGetCount(self) -> int:
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= self.gpus:
            raise ValueError("not found")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return b"GPU-%d" % handle

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H100"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        self.reads += 1
        if self.fails is not None:
            raise self.fails
        return SimpleNamespace(used=(handle + 1) * GIB, total=80 * GIB)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if handle == 3:
            raise ValueError("not supported")
        return SimpleNamespace(gpu=20 * handle)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    made = Nvml(gpus=4)
    monkeypatch.setitem(sys.modules, "pynvml", made)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "_INTERVAL_S", 0.001)
    return made


def sampled(until: Callable[[DeviceSampler], object]) -> list[Device]:
    """Starts a sampler, stops it once the condition holds, and returns its devices."""
    sampler = DeviceSampler()
    assert sampler.devices == []
    sampler.start()
    wait_for(lambda: bool(until(sampler)), "a sample")
    sampler.stop()
    return sampler.devices


def test_devices_are_read_from_nvml(nvml: Nvml) -> None:
    found = sampled(lambda sampler: sampler.devices)
    assert found == [
        Device("GPU-0", "NVIDIA H100", GIB, 80 * GIB, 0.0),
        Device("GPU-1", "NVIDIA H100", 2 * GIB, 80 * GIB, pytest.approx(0.2)),
        Device("GPU-2", "NVIDIA H100", 3 * GIB, 80 * GIB, pytest.approx(0.4)),
        Device("GPU-3", "NVIDIA H100", 4 * GIB, 80 * GIB, None),
    ]


@pytest.mark.parametrize(("visible", "ids"), [("2,0", ["GPU-2", "GPU-0"]), ("GPU-1", ["GPU-1"]), ("", []), ("-1", [])])
def test_only_visible_devices_are_read(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch, visible: str, ids: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    read = devices._reader()
    assert [one.id for one in (read() if read else [])] == ids


def test_the_utilisation_is_a_mean_of_recent_samples(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = iter([100] * 5 + [0] * 100_000)
    monkeypatch.setattr(nvml, "nvmlDeviceGetUtilizationRates", lambda handle: SimpleNamespace(gpu=next(busy)))
    monkeypatch.setattr(nvml, "gpus", 1)
    seen: list[float] = []

    def forgotten(sampler: DeviceSampler) -> bool:
        seen.extend(one.utilisation or 0.0 for one in sampler.devices)
        return bool(seen) and seen[-1] == 0.0

    sampled(forgotten)
    assert all(0.0 <= share <= 1.0 for share in seen)
    averaged = DeviceSampler()
    shares = [averaged._averaged(Device("a", "", 0, 1, share)).utilisation for share in (1.0, 0.0, 0.5)]
    assert shares == [1.0, 0.5, 0.5]


def test_a_driver_that_fails_is_read_again(nvml: Nvml) -> None:
    sampler = DeviceSampler()
    sampler.start()
    wait_for(lambda: bool(sampler.devices), "a sample")
    nvml.fails = OSError("GPU is lost")
    wait_for(lambda: not sampler.devices, "an empty sample")
    nvml.fails = None
    wait_for(lambda: bool(sampler.devices), "a sample")
    sampler.stop()


@pytest.mark.parametrize("fails", [ImportError("no module"), OSError("libnvidia-ml.so.1 not found"), ValueError()])
def test_without_an_accelerator_nothing_is_sampled(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch, fails: Exception
) -> None:
    if isinstance(fails, ImportError):
        monkeypatch.setitem(sys.modules, "pynvml", None)
        monkeypatch.setitem(sys.modules, "ray._private.thirdparty.pynvml", None)
    nvml.fails = fails
    tries: list[object] = []
    former = devices._reader
    monkeypatch.setattr(devices, "_reader", lambda: tries.append(former()))
    assert sampled(lambda sampler: len(tries) > 3) == [] and {*tries} == {None}
    assert device_metrics(RunDevices().of([("trainer", "local", [])])) == {}


class _Backend:
    """What is asked of `torch.npu`."""

    def __init__(self, initialized: bool) -> None:
        self.is_initialized = lambda: initialized

    def get_device_name(self, index: int) -> str:
        return "Ascend 910"

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 48 * GIB, 64 * GIB

    def utilization(self, index: int) -> int:
        return 35


@pytest.mark.parametrize("initialized", [True, False])
def test_another_accelerator_is_read_by_torch_once_it_is_in_use(
    monkeypatch: pytest.MonkeyPatch, initialized: bool
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "ray._private.thirdparty.pynvml", None)
    accelerator = SimpleNamespace(
        current_accelerator=lambda check_available: SimpleNamespace(type="npu"), device_count=lambda: 1
    )
    torch = SimpleNamespace(accelerator=accelerator, npu=_Backend(initialized))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "6")
    read = devices._reader()
    assert (read() if read else []) == ([Device("6", "Ascend 910", 16 * GIB, 64 * GIB, 0.35)] if initialized else [])


def test_devices_of_a_run_keep_their_numbers() -> None:
    """Two workers may share a device, and two machines have devices of the same id."""
    run = RunDevices()
    one, other = Device("0", "a", 1, 2, 0.5), Device("1", "a", 1, 2, None)
    first = run.of([("trainer", "n1", [one]), ("rollout-0", "n1", [one, other]), ("rollout-1", "n2", [one])])
    assert [(used.number, used.node, used.workers) for used in first] == [
        (0, "n1", ["trainer", "rollout-0"]), (1, "n1", ["rollout-0"]), (2, "n2", ["rollout-1"]),
    ]  # fmt: skip
    second = run.of([("rollout-1", "n2", [one])])
    assert [used.number for used in second] == [2]
    numbers = device_metrics(first)
    assert numbers == {
        "device/0/memory_bytes": 1, "device/0/utilisation": 0.5, "device/1/memory_bytes": 1,
        "device/2/memory_bytes": 1, "device/2/utilisation": 0.5,
    }  # fmt: skip
    metrics: Mapping[str, Any] = {name: find(name)[0] for name in numbers}
    assert None not in metrics.values()
