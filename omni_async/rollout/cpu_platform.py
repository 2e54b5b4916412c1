"""Lets vLLM-Omni run without an accelerator.

vLLM-Omni's own platforms are all for devices; an entry point may add another platform."""

from __future__ import annotations


def register() -> str | None:
    """Serve the entry point of `vllm_omni.platform_plugins`.

    Returns the class path of our CPU platform, or None if there is a device to use."""
    import torch

    return None if torch.accelerator.is_available() else "omni_async.rollout.vllm_cpu.CpuOmniPlatform"
