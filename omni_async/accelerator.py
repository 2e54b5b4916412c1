"""Finds the accelerators of this machine.

Some functions answer in an instant, without a driver or torch; the others report what torch sees.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_NVIDIA = re.compile(r"nvidia\d+")
# Device files whose count alone proves little: AMD and integrated graphics (dri), Intel, Gaudi and others (accel),
# Ascend, WSL.
_OTHERS = re.compile(r"kfd|dri|accel\d*|davinci.*|dxg|hl\d+")
_ASCEND = re.compile(r"davinci\d+")
_HIDES_ALL = ("", "-1", "NoDevFiles")
# Ray's name of a kind of device -> the variable that hides devices from a process and its children.
_VISIBLE = {"GPU": "CUDA_VISIBLE_DEVICES", "NPU": "ASCEND_RT_VISIBLE_DEVICES"}


def most_accelerators(
    devices: Path = Path("/dev"), environment: Mapping[str, str] = os.environ, kind: str = "auto"
) -> tuple[int, str] | None:
    """Return an upper bound on the accelerators, as CUDA and Ray count them, and its reason.

    Returns None if only a driver knows. Takes no time: calls neither torch, Ray nor a driver.

    Args:
        devices: the folder of device files.
        environment: variables that may hide devices.
        kind: as `placement.accelerator`."""
    try:
        names = [entry.name for entry in devices.iterdir()]
    except OSError:
        return None
    if kind == "NPU":
        return _visible(names, _ASCEND, _VISIBLE[kind], devices, environment)
    if any(_OTHERS.fullmatch(name) for name in names):
        return None
    found = _visible(names, _NVIDIA, _VISIBLE["GPU"], devices, environment)
    if any(map(_NVIDIA.fullmatch, names)) and _torch().endswith("+cpu"):
        return 0, f"torch {_torch()} is a build for CPUs"
    return found


def _visible(
    names: Sequence[str], pattern: re.Pattern[str], variable: str, devices: Path, environment: Mapping[str, str]
) -> tuple[int, str]:
    """Count the existing devices that the variable does not hide."""
    found = sum(pattern.fullmatch(name) is not None for name in names)
    visible = environment.get(variable)
    if not found:
        return 0, f"{devices} has none"
    if visible is None:
        return found, f"{devices} has so many"
    return min(found, len(_shown(visible))), f"{variable}={visible}"


def _shown(visible: str) -> list[str]:
    """Return the ids that a variable's value shows."""
    return [] if visible.strip() in _HIDES_ALL else visible.split(",")


def nvidia_ids(environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """Return the ids of the Nvidia devices that the environment shows a process; None: all of them."""
    visible = environment.get(_VISIBLE["GPU"])
    return None if visible is None else _shown(visible)


def showing(devices: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the environment variables that show a process and its children these devices and hide all others.

    Set them before the process uses a device.

    Args:
        devices: ids by Ray's name of their kind, as an actor's `get_accelerator_ids()`."""
    return {variable: ",".join(devices.get(kind, ())) for kind, variable in _VISIBLE.items()}


def visible_devices(environment: Mapping[str, str] = os.environ) -> tuple[str, list[str]]:
    """Return Ray's name of the kind of device that torch uses in this process, and the ids of those it sees.

    The ids are empty if torch sees no device."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    kind = "NPU" if found is not None and found.type == "npu" else "GPU"
    count = 0 if found is None else torch.accelerator.device_count()
    given = environment.get(_VISIBLE[kind])
    ids = list(map(str, range(count))) if given is None else _shown(given)
    return kind, ids[:count]


def require_accelerator(key: str, asked: float) -> torch.device:
    """Return the accelerator that torch would use.

    Raises RuntimeError, naming `key`, if torch sees none: otherwise the work would silently run on the CPU."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        raise RuntimeError(
            f"{key}: {asked:g} asked for, but torch {torch.__version__} sees no accelerator here; 0 runs on the CPU"
        )
    return found


def vllm_without_cpus() -> str | None:
    """Return the version of the installed vLLM if it runs on accelerators only.

    Returns None if its build is for CPUs, or vLLM is not installed."""
    found = _installed("vllm")
    return found if found and "cpu" not in found else None


def _torch() -> str:
    return _installed("torch")


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
