"""Builds a model of a wanted size: the least that trainer and engines need to carry its weights, named as a
transformer's."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from omni_async.config import Config
from omni_async.policy import PipelineFamily
from omni_async.sde.schedules import linear

SIZED = PipelineFamily("sized", "benchmarks.weights_model:SizedPolicy", "")
LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out")


def sized_config(
    megabytes: float, *, lora_rank: int | None = None, bucket_mb: int = 256, timeout_s: float = 120.0
) -> Config:
    """Configures trainer and engines of a `SizedPolicy`; with `lora_rank` adapters are what is trained and
    published."""
    tree: dict[str, Any] = {
        "model": {"path": repr(float(megabytes))},
        "data": {"prompts": "none"},
        "rollout": {"engine": "diffusers", "height": 32, "width": 32},
        "weights": {"bucket_mb": bucket_mb, "timeout_s": timeout_s},
        "trainer": {"optimizer": {"name": "sgd"}},
    }
    if lora_rank is not None:
        tree["model"]["lora"] = {"rank": lora_rank, "alpha": lora_rank, "target_modules": LORA_TARGETS}
        tree["weights"]["payload"] = "lora"
    return msgspec.convert(tree, Config)


class SizedPolicy:
    """An `omni_async.policy.Policy`; `path` is the megabytes of its float32 weights: square matrices of 256 kB up to
    20 MB and of 4 MB beyond. The transformer loaded last is kept, so that it can be changed from outside."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.transformer: nn.Module | None = None

    def load_transformer(self, dtype: torch.dtype) -> nn.Module:
        megabytes = float(self.path)
        width = 256 if megabytes <= 20 else 1024
        blocks = max(1, round(megabytes * 1e6 / (4 * width * width * len(LORA_TARGETS))))
        self.transformer = _Blocks(blocks, width).to(dtype).eval()
        return self.transformer

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        return _latent_shape(height, width)

    def sigmas(self, num_inference_steps: int, height: int, width: int) -> Tensor:
        return linear(num_inference_steps)

    def velocity(
        self, transformer: nn.Module, latents: Tensor, sigma: Tensor, conditioning: TensorDict, **_: Any
    ) -> Tensor:
        """Computes with the first matrix alone."""
        out: Tensor = transformer(latents)
        return out

    def stack_conditioning(self, rows: list[TensorDict]) -> TensorDict:
        return TensorDict({}, batch_size=[len(rows)])

    def blank_conditioning(self, guided: bool) -> TensorDict:
        return TensorDict({}, batch_size=[])

    def load_codec(self, dtype: torch.dtype) -> _Codec:
        return _Codec()


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        for name in LORA_TARGETS:
            self.add_module(name, nn.utils.skip_init(nn.Linear, width, width, bias=False))


class _Blocks(nn.Module):
    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(width) for _ in range(number))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-0.01, 0.01, generator=generator)

    def forward(self, latents: Tensor) -> Tensor:
        layer: Any = self.blocks[0].to_q
        channels = latents.shape[-1]
        x = nn.functional.pad(latents, (0, layer.in_features - channels)).to(layer.weight.dtype)
        out: Tensor = torch.tanh(layer(x))[..., :channels].to(latents.dtype)
        return out


def _latent_shape(height: int, width: int) -> tuple[int, int]:
    return (height // 16) * (width // 16), 4


class _Codec:
    def to(self, device: Any) -> _Codec:
        return self

    def encode(self, prompt: str, negative_prompt: str | None) -> TensorDict:
        return TensorDict({}, batch_size=[])

    def decode(self, latents: Tensor, height: int, width: int) -> Tensor:
        return torch.zeros(len(latents), 3, height, width, dtype=torch.uint8)

    def encode_images(self, pixels: Tensor) -> Tensor:
        return torch.zeros(len(pixels), *_latent_shape(*pixels.shape[-2:]))
