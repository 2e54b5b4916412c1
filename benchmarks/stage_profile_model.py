"""Builds Qwen-Image with random weights on its device: the published architecture without a checkpoint or a download.

There is no text encoder: prompt embeddings are random too, as many as for a prompt of usual length. Everything after
them is the real model's code. The same seed and device give the same weights, so an engine and a trainer have the same
policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from omni_async_pipelines.qwen_image.policy import PATCH, QwenImageCodec, QwenImagePolicy
from omni_async_pipelines.qwen_image.sampling import QwenImageSampling
from tensordict import TensorDict
from torch import nn

from omni_async.types import Prompt


@dataclass(frozen=True)
class Architecture:
    """Arguments of diffusers' `QwenImageTransformer2DModel` and `AutoencoderKLQwenImage`."""

    name: str
    transformer: dict[str, Any]
    vae: dict[str, Any]


# Qwen/Qwen-Image: 20.4 G parameters in the transformer, 127 M in the VAE.
PUBLISHED = Architecture(
    "qwen_image",
    transformer={
        "patch_size": 2,
        "in_channels": 64,
        "out_channels": 16,
        "num_layers": 60,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 3584,
        "axes_dims_rope": (16, 56, 56),
    },
    vae={
        "base_dim": 96,
        "z_dim": 16,
        "dim_mult": [1, 2, 4, 4],
        "num_res_blocks": 2,
        "temperal_downsample": [False, True, True],
    },
)
# Its scheduler; `omni_async_pipelines.qwen_image.tiny.build_scheduler` builds the same as an object.
SCHEDULER = {
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
}


def tiny_architecture() -> Architecture:
    """Return the architecture of `omni_async_pipelines.qwen_image.tiny`."""
    from omni_async_pipelines.qwen_image.tiny import build_components

    parts: Any = build_components()

    def of(part: Any, published: dict[str, Any]) -> dict[str, Any]:
        return {name: part.config[name] for name in published}

    return Architecture("tiny", of(parts.transformer, PUBLISHED.transformer), of(parts.vae, PUBLISHED.vae))


class RandomQwenImage(QwenImagePolicy):
    """A `QwenImagePolicy` with random weights.

    `load_components` and `load_codec` return models that are on `device` already."""

    def __init__(
        self, architecture: Architecture, device: torch.device, *, prompt_tokens: int, negative_tokens: int, seed: int
    ) -> None:
        # Not the parent's __init__, which reads a checkpoint's configuration files.
        self.path = f"random weights ({architecture.name})"
        self.in_channels = int(architecture.transformer["in_channels"])
        self.text_width = int(architecture.transformer["joint_attention_dim"])
        self.pixels_per_token = PATCH * 2 ** len(architecture.vae["temperal_downsample"])
        self.scheduler_config = SCHEDULER
        self._architecture = architecture
        self._device = device
        self._tokens = {"prompt": prompt_tokens, "negative_prompt": negative_tokens}
        self._seed = seed

    def load_components(self, dtype: torch.dtype) -> dict[str, nn.Module]:
        with _made_on(self._device, dtype, self._seed):
            transformer: Any = QwenImageTransformer2DModel(**self._architecture.transformer)
        return {"transformer": transformer.eval()}

    build_components = None  # type: ignore[assignment]  # there are no files to read afterwards

    def load_codec(self, dtype: torch.dtype) -> QwenImageCodec:
        with _made_on(self._device, dtype, self._seed):
            vae: Any = AutoencoderKLQwenImage(**self._architecture.vae)
        return _RandomCodec(vae.eval(), self.text_width, self._tokens)


class _RandomCodec(QwenImageCodec):
    """A codec with random embeddings in place of a text encoder's, and the real VAE."""

    def __init__(self, vae: Any, text_width: int, tokens: dict[str, int]) -> None:
        encoder = nn.Module()
        encoder.model = nn.Module()
        super().__init__(tokenizer=None, text_encoder=encoder, vae=vae)
        self._text_width = text_width
        self._tokens = tokens

    def encode(self, prompt: Prompt, spec: QwenImageSampling) -> TensorDict:
        tensors = {}
        for branch in ("prompt", "negative_prompt") if spec.guided else ("prompt",):
            count = self._tokens[branch]
            tensors[f"{branch}_embeds"] = torch.randn(
                count, self._text_width, device=self.vae.device, dtype=self.vae.dtype
            )
            tensors[f"{branch}_mask"] = torch.ones(count, dtype=torch.bool, device=self.vae.device)
        return TensorDict(tensors, batch_size=[])


@contextmanager
def _made_on(device: torch.device, dtype: torch.dtype, seed: int) -> Iterator[None]:
    """Create parameters on `device` in `dtype`: 20 G of them do not fit twice, nor into the host in float32."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng(), device:
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
