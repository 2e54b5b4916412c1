"""Lets vLLM-Omni run where there is no accelerator.

Its own platforms are all devices, and an entry point may add one."""

from __future__ import annotations


def register() -> str | None:
    """Serve the entry point of `vllm_omni.platform_plugins`.

    Returns the class path of our CPU platform, or None where there is a device to use."""
    import torch

    return None if torch.accelerator.is_available() else "omni_async.rollout.vllm_cpu.CpuOmniPlatform"
