"""Reports the machine, and which attention kernels its card runs."""

from __future__ import annotations

import math
import os
import shutil
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_probe_bench import Bench
from benchmarks.gpu_probe_run import Report, Settings, first_line
from omni_async.commands.bench.result import describe_machine
from omni_async.training.device import collective_backend, init_lone_process_group

_PACKAGES = ("torch", "triton", "diffusers", "fa3_fwd", "vllm", "vllm-omni", "ray")
_DRIVER = Path("/proc/driver/nvidia/version")
_SHARED = Path("/dev/shm")


def machine(settings: Settings, report: Report) -> None:
    """Report the card and its driver, the host's memory, and that a collective of one rank runs."""
    bench = Bench(settings, report)
    described = describe_machine(with_gpus=bench.accelerated)
    bench.note("host", cpu=described.cpu, cpus=described.cpus, python=described.python, system=described.system)
    bench.note("packages", **{name: found for name in _PACKAGES if (found := _installed(name))})
    bench.note("host memory", total_gib=_gib(described.memory_bytes), free_gib=_gib(psutil.virtual_memory().available))
    if _SHARED.is_dir():
        bench.note("/dev/shm", total_gib=_gib(shutil.disk_usage(_SHARED).total))
    if bench.accelerated:
        _card(bench)
    with bench.arm("collective of one rank"):
        init_lone_process_group(bench.device)
        total = torch.ones(1, device=bench.device)
        dist.all_reduce(total)
        bench.note("collective of one rank", backend=collective_backend(bench.device), sum=float(total))
        dist.destroy_process_group()


def _card(bench: Bench) -> None:
    device = torch.get_device_module(bench.device)
    properties = device.get_device_properties(bench.device)
    major_minor = getattr(device, "get_device_capability", lambda _: None)(bench.device)
    bench.note(
        "card",
        model=properties.name,
        count=torch.accelerator.device_count(),
        total_gib=_gib(properties.total_memory),
        capability=major_minor and ".".join(map(str, major_minor)),
        built_for=torch.version.cuda or torch.version.hip,
        driver=_driver(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def _driver() -> str | None:
    """Return the version of NVIDIA's kernel module; None without its file."""
    try:
        words = _DRIVER.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return None
    return next((word for word in words if word[:1].isdigit() and "." in word), None)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gib(nbytes: int) -> float:
    return nbytes / 2**30


def attention(settings: Settings, report: Report) -> None:
    """Report each kernel's cost of an attention of the model's shape, by dtype, or its refusal."""
    bench = Bench(settings, report)
    heads, tokens = (2, 32) if bench.small else (24, 1088)
    shape = (bench.rows[0], heads, tokens, 128)
    flops = 4 * math.prod(shape) * tokens
    kernels: dict[str, Callable[[Tensor], object]] = {
        "flash": _by(SDPBackend.FLASH_ATTENTION),
        "cudnn": _by(SDPBackend.CUDNN_ATTENTION),
        "efficient": _by(SDPBackend.EFFICIENT_ATTENTION),
        "math": _by(SDPBackend.MATH),
        "default": lambda q: scaled_dot_product_attention(q, q, q),
        "fa3_fwd": lambda q: flash_attention_3(q, q, q),
    }
    noise = bench.noise(*shape)
    for kernel, run in kernels.items():
        for dtype in (torch.bfloat16, torch.float32):
            name, q = f"{kernel} in {str(dtype).removeprefix('torch.')}", noise.to(dtype)
            try:
                with warnings.catch_warnings(action="ignore"):
                    seconds, gib = bench.time(lambda run=run, q=q: run(q))  # type: ignore[misc]
            except Exception as error:  # noqa: BLE001 - a refusal of any type is the reading
                bench.note(name, refused=first_line(error))
            else:
                bench.note(name, seconds=seconds, **bench.rates(flops, seconds), gib=gib)


def _by(backend: SDPBackend) -> Callable[[Tensor], object]:
    def run(q: Tensor) -> object:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, q, q)

    return run


def flash_attention_3(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the attention of tensors (B, heads, L, D), by vLLM-Omni's library for Hopper; same shape."""
    from fa3_fwd_interface import flash_attn_func

    found = flash_attn_func(*(tensor.transpose(1, 2).contiguous() for tensor in (query, key, value)))
    attended: Tensor = found[0] if isinstance(found, tuple) else found
    return attended.transpose(1, 2)
