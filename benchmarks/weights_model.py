"""Builds a model of a given size: the minimum that trainer and engines need, with a transformer's weight names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from omni_async.config import Config, with_spec
from omni_async.diffusion.sde.schedules import linear
from omni_async.media import Media
from omni_async.plugins.families import PipelineFamily, SamplingSpec
from omni_async.types import Prompt

SIZED = PipelineFamily("sized", "benchmarks.weights_model:SizedPolicy", "", SamplingSpec)
LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out")


def sized_config(
    megabytes: float, *, lora_rank: int | None = None, bucket_mb: int = 256, timeout_s: float = 120.0
) -> Config:
    """Configure trainer and engines of a `SizedPolicy`; with `lora_rank`, adapters are trained and published."""
    tree: dict[str, Any] = {
        "model": {"pipeline": "qwen_image", "path": repr(float(megabytes))},
        "data": {"prompts": "none"},
        "rollout": {"engine": "diffusers", "sampling": {"height": 32, "width": 32}},
        "weights": {"bucket_mb": bucket_mb, "timeout_s": timeout_s},
        "trainer": {"optimizer": {"name": "sgd"}},
    }
    if lora_rank is not None:
        tree["model"]["lora"] = {"rank": lora_rank, "alpha": lora_rank, "target_modules": LORA_TARGETS}
        tree["weights"]["payload"] = "lora"
    return with_spec(msgspec.convert(tree, Config))


class SizedPolicy:
    """An `omni_async.diffusion.policy.Policy` of a given size.

    `path` is the megabytes of its float32 weights: square matrices of 256 kB up to 20 MB and of 4 MB beyond. The
    transformer loaded last is kept, so that it can be changed from outside."""

    components: tuple[str, ...] = ("transformer",)
    sequence_plan: None = None

    def __init__(self, path: str) -> None:
        self.path = path
        self.transformer: nn.Module | None = None

    def load_components(self, dtype: torch.dtype) -> dict[str, nn.Module]:
        megabytes = float(self.path)
        width = 256 if megabytes <= 20 else 1024
        blocks = max(1, round(megabytes * 1e6 / (4 * width * width * len(LORA_TARGETS))))
        self.transformer = _Blocks(blocks, width).to(dtype).eval()
        return {"transformer": self.transformer}

    def component_of(self, sigma: float) -> str:
        return "transformer"

    def latent_shape(self, spec: SamplingSpec) -> tuple[int, ...]:
        return _latent_shape(*_size(spec))

    def sigmas(self, num_inference_steps: int, spec: SamplingSpec) -> Tensor:
        return linear(num_inference_steps)

    def velocity(
        self,
        components: Mapping[str, nn.Module],
        latents: Tensor,
        sigma: Tensor,
        conditioning: TensorDict,
        spec: SamplingSpec,
        **_: Any,
    ) -> Tensor:
        """Compute with only the first matrix."""
        out: Tensor = components["transformer"](latents)
        return out

    def stack_conditioning(self, rows: list[TensorDict]) -> TensorDict:
        return TensorDict({}, batch_size=[len(rows)])

    def blank_conditioning(self, spec: SamplingSpec) -> TensorDict:
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


def _size(spec: SamplingSpec) -> tuple[int, int]:
    """Return height and width of the spec's image."""
    (media,) = spec.media()
    _, height, width = media.shape
    return height, width


def _latent_shape(height: int, width: int) -> tuple[int, int]:
    return (height // 16) * (width // 16), 4


class _Codec:
    def to(self, device: Any) -> _Codec:
        return self

    def encode(self, prompt: Prompt, spec: SamplingSpec) -> TensorDict:
        return TensorDict({}, batch_size=[])

    def decode(self, latents: Tensor, spec: SamplingSpec) -> list[Media]:
        return [Media(image=torch.zeros(3, *_size(spec), dtype=torch.uint8)) for _ in latents]

    def encode_media(self, media: list[Media], spec: SamplingSpec) -> Tensor:
        return torch.zeros(len(media), *_latent_shape(*_size(spec)))
