"""Describes the machine of a benchmark, for the reader of its numbers."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import msgspec
import psutil

_PACKAGES = ("omni-async", "ray", "torch", "vllm-omni")


class Machine(msgspec.Struct, frozen=True):
    """Hardware and versions. `cpus`: those this process may use. `gpus`: names, empty where none was asked for."""

    cpu: str
    cpus: int
    memory_bytes: int
    system: str
    python: str
    packages: dict[str, str]
    gpus: tuple[str, ...] = ()

    def __str__(self) -> str:
        memory = f"{self.memory_bytes / 2**30:.0f} GiB"
        versions = ", ".join(
            [f"Python {self.python}", *(f"{name} {version}" for name, version in self.packages.items())]
        )
        return (
            f"{self.cpu}, {self.cpus} CPUs, {memory}{''.join(f', {gpu}' for gpu in self.gpus)}; {self.system};"
            f" {versions}"
        )


def describe_machine(with_gpus: bool = False) -> Machine:
    """Describe this machine. `with_gpus` asks torch, which is imported for that."""
    return Machine(
        cpu=_cpu_model(),
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        system=platform.platform(terse=True),
        python=platform.python_version(),
        packages=dict(_versions()),
        gpus=_gpus() if with_gpus else (),
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _versions() -> list[tuple[str, str]]:
    found = []
    for name in _PACKAGES:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return found


def _gpus() -> tuple[str, ...]:
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ()
    name = torch.get_device_module(accelerator).get_device_name
    return tuple(name(i) for i in range(torch.accelerator.device_count()))
