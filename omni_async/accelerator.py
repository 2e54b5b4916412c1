"""Finds out which accelerators this machine has.

It says what can be known in a moment, without a driver or torch, and what torch says.
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
# Devices of makers whose count says little by itself: AMD and integrated graphics (dri), Intel, Gaudi and others
# (accel), Ascend, WSL.
_OTHERS = re.compile(r"kfd|dri|accel\d*|davinci.*|dxg|hl\d+")
_ASCEND = re.compile(r"davinci\d+")
_HIDES_ALL = ("", "-1", "NoDevFiles")


def most_accelerators(
    devices: Path = Path("/dev"), environment: Mapping[str, str] = os.environ, kind: str = "auto"
) -> tuple[int, str] | None:
    """Return an upper bound on the accelerators, as CUDA and Ray count them, and its reason.

    It is None if only a driver knows. Takes no time: no torch, no Ray, no driver is asked.

    Args:
        devices: the folder of device files.
        environment: variables that may hide devices.
        kind: as `placement.accelerator`."""
    try:
        names = [entry.name for entry in devices.iterdir()]
    except OSError:
        return None
    if kind == "NPU":
        return _visible(names, _ASCEND, "ASCEND_RT_VISIBLE_DEVICES", devices, environment)
    if any(_OTHERS.fullmatch(name) for name in names):
        return None
    found = _visible(names, _NVIDIA, "CUDA_VISIBLE_DEVICES", devices, environment)
    if any(map(_NVIDIA.fullmatch, names)) and _torch().endswith("+cpu"):
        return 0, f"torch {_torch()} is a build for CPUs"
    return found


def _visible(
    names: Sequence[str], pattern: re.Pattern[str], variable: str, devices: Path, environment: Mapping[str, str]
) -> tuple[int, str]:
    """Count the devices that are there and that the variable does not hide."""
    found = sum(pattern.fullmatch(name) is not None for name in names)
    visible = environment.get(variable)
    if not found:
        return 0, f"{devices} has none"
    if visible is None:
        return found, f"{devices} has so many"
    shown = [] if visible.strip() in _HIDES_ALL else visible.split(",")
    return min(found, len(shown)), f"{variable}={visible}"


def require_accelerator(key: str, asked: float) -> torch.device:
    """Return the accelerator that torch would use.

    Raises RuntimeError, under `key`, if torch sees none: what was meant for one would run on the CPU unnoticed."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        raise RuntimeError(
            f"{key}: {asked:g} asked for, but torch {torch.__version__} sees no accelerator here; 0 runs on the CPU"
        )
    return found


def _torch() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
