"""Reports which kernels vLLM-Omni chose for a model."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from vllm_omni.diffusion.attention.layer import Attention
from vllm_omni.platforms import current_omni_platform


def kernels_of(denoisers: Iterable[nn.Module], *, compiled: bool) -> str:
    """Return the attention backends of all layers, and whether vLLM-Omni compiles layers, as a sentence."""
    layers = [part for denoiser in denoisers for part in denoiser.modules() if isinstance(part, Attention)]
    names = sorted(
        {
            layer.attn_impl_cls.__name__ if layer.attn_backend is None else layer.attn_backend.get_name()
            for layer in layers
        }
    )
    how = "compiled" if compiled and current_omni_platform.supports_torch_inductor() else "not compiled"
    return f"attention {', '.join(names) or 'unknown'}, {how}"
