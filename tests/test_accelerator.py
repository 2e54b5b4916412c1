"""Tests the bound on accelerators that is known without a driver, and that nothing falls back to the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from omni_async import accelerator
from omni_async.accelerator import most_accelerators, require_accelerator, showing, visible_devices
from tests.support.patience import PATIENCE


@pytest.fixture(autouse=True)
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "_torch", lambda: "2.13.0+cu130")


def devices(folder: Path, *names: str) -> Path:
    for name in ("null", "nvidiactl", "nvidia-uvm", *names):
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("names", "visible", "count"),
    [
        ((), None, 0),
        (("nvidia0", "nvidia3"), None, 2),
        (("nvidia0", "nvidia1"), "1", 1),
        (("nvidia0", "nvidia1"), "0,1,2", 2),
        (("nvidia0",), "", 0),
        (("nvidia0",), "-1", 0),
    ],
)
def test_visible_nvidia_devices_count(tmp_path, names, visible, count):
    found = most_accelerators(devices(tmp_path, *names), {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert found is not None and found[0] == count
    assert visible is None or found[1] == f"CUDA_VISIBLE_DEVICES={visible}"


@pytest.mark.parametrize("name", ["kfd", "dri", "davinci0", "davinci_manager", "accel", "dxg"])
def test_unknown_drivers_are_not_guessed(tmp_path: Path, name: str) -> None:
    assert most_accelerators(devices(tmp_path, name, "nvidia0"), {}) is None
    assert most_accelerators(tmp_path / "nowhere", {}) is None


@pytest.mark.parametrize(
    ("names", "environment", "found"),
    [
        (("davinci0", "davinci1", "davinci_manager", "nvidia0"), {}, 2),
        (("davinci0", "davinci1"), {"ASCEND_RT_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": ""}, 1),
        (("nvidia0", "dri"), {}, 0),
    ],
)
def test_ascend_devices_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], environment: dict[str, str], found: int
) -> None:
    monkeypatch.setattr(accelerator, "_torch", lambda: "2.13.0+cpu")  # torch-npu is an addition to that build
    count = most_accelerators(devices(tmp_path, *names), environment, kind="NPU")
    assert count is not None and count[0] == found
    (tmp_path / "other").mkdir()
    cpus = (0, "torch 2.13.0+cpu is a build for CPUs")
    assert most_accelerators(devices(tmp_path / "other", "nvidia0"), {}) == cpus


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one here")
def test_no_fallback_to_the_cpu() -> None:
    said = r"^placement\.trainer\.gpus: 0\.5 asked for, but torch \S+ sees no accelerator here; 0 runs on the CPU$"
    with pytest.raises(RuntimeError, match=said):
        require_accelerator("placement.trainer.gpus", 0.5)


def test_other_kinds_are_hidden() -> None:
    assert showing({"GPU": ["4", "6"], "TPU": ["0"]}) == {
        "CUDA_VISIBLE_DEVICES": "4,6",
        "ASCEND_RT_VISIBLE_DEVICES": "",
    }
    assert showing({"NPU": ["1"]}) == {"CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": "1"}


@pytest.mark.parametrize(
    ("kind", "environment", "ids"),
    [
        ("npu", {"CUDA_VISIBLE_DEVICES": "5"}, ["0", "1"]),
        ("npu", {"ASCEND_RT_VISIBLE_DEVICES": "3,5"}, ["3", "5"]),
        ("meta", {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}, ["GPU-a", "GPU-b"]),
    ],
)
def test_ids_of_visible_devices(monkeypatch, kind, environment, ids):
    device = SimpleNamespace(type=kind)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available: device)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    assert visible_devices(environment) == ("NPU" if kind == "npu" else "GPU", ids)


HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""}


@pytest.mark.gpu
@pytest.mark.parametrize("environment", [{}, HIDDEN], ids=["visible", "hidden"])
def test_hidden_accelerators_are_none(environment: dict[str, str]) -> None:
    code = "from omni_async.accelerator import require_accelerator; require_accelerator('placement.rollout.gpus', 1)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert ("sees no accelerator here" in done.stderr) == bool(environment), done.stderr
    assert done.returncode == bool(environment)
