"""Applies vLLM-Omni's rotary embedding on a CPU as one complex multiplication.

vLLM-Omni's native form repeats the tables and moves every query and key seven times through memory, for each layer and
step. diffusers' Qwen-Image, which trains, multiplies complex numbers as well, so engine and trainer also agree better.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from vllm_omni.diffusion.layers.rope import RotaryEmbedding


def specialise(modules: list[nn.Module]) -> None:
    """Replace the rotation of adjacent pairs in these modules, in place; results differ by rounding."""
    for module in modules:
        if isinstance(module, RotaryEmbedding) and module.interleaved:
            module._forward_method = _Rotation(module)


class _Rotation:
    def __init__(self, rope: RotaryEmbedding) -> None:
        self._rope = rope

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x (B, L, H, D), or (L, H, D), by the angles of cos and sin."""
        half_cos, half_sin = self._rope._prepare_half_head_dim_cos_sin(cos, sin)
        whole = 2 * half_cos.shape[-1] == x.shape[-1]
        if not whole or x.dtype != torch.float32 or torch.compiler.is_compiling():
            native: Tensor = self._rope.forward_native(x, cos, sin)
            return native
        turns = torch.complex(half_cos.float(), half_sin.float()).unsqueeze(-2)
        pairs = torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turns).flatten(-2)
