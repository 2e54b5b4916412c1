"""Extends vLLM's CPU platform by the interface that vLLM-Omni adds, for diffusion stages.

`cpu_platform` decides when it is chosen. Importing it makes vLLM's layers load without vLLM's kernels."""

from __future__ import annotations

import os
from typing import Any

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


def _define_activation() -> None:
    """Define the operator that vLLM's activation layer looks up, if vLLM's kernels do not load.

    They link libnuma, which a slim Linux lacks. On a CPU the layer never calls the operator: it computes with torch."""
    CpuPlatform.import_kernels()  # First, because a kernel cannot be defined a second time.
    if not hasattr(torch.ops._C, "silu_and_mul"):
        _OPERATORS.define("silu_and_mul(Tensor! out, Tensor input) -> ()")


# Torch forgets the operators of a library that is collected.
_OPERATORS = torch.library.Library("_C", "FRAGMENT")
_define_activation()


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    _omni_enum = OmniPlatformEnum.OOT
    # vLLM-Omni writes logical device numbers to this variable, so it must differ from vLLM's variable for NUMA nodes.
    device_control_env_var = "OMNI_ASYNC_CPU_DEVICES"

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        if selected_backend not in (None, "TORCH_SDPA", "SDPA"):
            raise ValueError(f"on a CPU the only attention backend is TORCH_SDPA, got {selected_backend}")
        return "omni_async.rollout.vllm_cpu_attention.CpuSDPABackend"

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/deploy"

    @classmethod
    def _no(cls) -> bool:
        return False

    @classmethod
    def _do_nothing(cls, device: Any = None) -> None:
        return None

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return True

    supports_diffusion_dense_flash_attention = _no
    set_device = synchronize = empty_cache = record_device_event = reset_peak_memory_stats = _do_nothing

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return os.cpu_count() or 1

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    # vLLM-Omni reads the peak after every denoising step of every batch; reading /proc that often costs more than the
    # number is worth.
    @classmethod
    def max_memory_reserved(cls, device: Any = None) -> int:
        return 0

    max_memory_allocated = max_memory_reserved

    @classmethod
    def get_free_memory(cls, device: Any = None) -> int:
        return int(psutil.virtual_memory().available)

    @classmethod
    def get_device_memory(cls, device: Any = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)
