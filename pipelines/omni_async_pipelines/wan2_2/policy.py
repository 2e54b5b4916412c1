"""Computes conditioning, latent shape and velocity of Wan2.2 text-to-video.

All three follow diffusers' `WanPipeline` with `FlowMatchEulerDiscreteScheduler` in place of its multistep solver.

Latents are (C, (F - 1) / 4 + 1, H / s, W / s) of F frames; s = 8 and C = 16 for the 14B models, 16 and 48 for TI2V-5B.
The 14B models have two experts, each with its own guidance scale: `transformer` takes sigma >= boundary_ratio,
`transformer_2` lower ones. TI2V-5B (`expand_timesteps`) has one, which takes a time per token.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from omni_async.diffusion.policy import SequencePlan
from omni_async.diffusion.sde.schedules import static_shift
from omni_async.media import Media
from omni_async_pipelines.parts import (
    DiffusersCodec,
    DiffusersPolicy,
    as_videos,
    latent_grid,
    latent_statistics,
    stack_pixels,
)
from omni_async_pipelines.sampling import read_config
from omni_async_pipelines.wan2_2.sampling import TEMPORAL, Wan22Sampling

HIGH, LOW = "transformer", "transformer_2"


class Wan22Codec(DiffusersCodec):
    """A codec, see `omni_async.diffusion.policy.Codec`, around diffusers' pipeline, which encodes prompts."""

    def __init__(self, *, tokenizer: Any, text_encoder: Any, vae: Any) -> None:
        from diffusers import WanPipeline

        super().__init__(vae=vae, text_encoder=text_encoder)
        self._encoder: Any = WanPipeline(
            tokenizer=tokenizer, text_encoder=text_encoder, vae=vae, scheduler=None, transformer=None
        )

    def encode_text(self, text: str, spec: Wan22Sampling) -> dict[str, Tensor]:
        length = spec.max_sequence_length
        embeds, _ = self._encoder.encode_prompt(text, None, False, max_sequence_length=length, device=self.vae.device)
        return {"embeds": embeds[0]}

    @torch.no_grad()
    def decode(self, latents: Tensor, spec: Wan22Sampling) -> list[Media]:
        maps = latents.to(self.vae.device, self.vae.dtype)
        mean, std = latent_statistics(self.vae, maps)
        batches = (maps * std + mean).split(self.most_at_once(spec))
        return [
            media for batch in batches for media in as_videos(self.vae.decode(batch, return_dict=False)[0], spec.fps)
        ]

    def encode_media(self, media: list[Media], spec: Wan22Sampling) -> Tensor:
        return self.encode_videos(stack_pixels(media, spec).transpose(1, 2))

    @torch.no_grad()
    def encode_videos(self, videos: Tensor) -> Tensor:
        """Return the latents of videos (B, 3, F, H, W) in [-1, 1]."""
        maps: Tensor = self.vae.encode(videos.to(self.vae.device, self.vae.dtype)).latent_dist.mode().float()
        mean, std = latent_statistics(self.vae, maps)
        return (maps - mean) / std


class Wan22Policy(DiffusersPolicy):
    """A policy, see `omni_async.diffusion.policy.Policy`.

    Conditioning: `embeds` (max_sequence_length, E) of the prompt and the negative one, zeros after the text."""

    denoiser = "WanTransformer3DModel"
    parts: ClassVar = {
        "tokenizer": "transformers.AutoTokenizer",
        "text_encoder": "transformers.UMT5EncoderModel",
        "vae": "diffusers.AutoencoderKLWan",
    }
    codec = Wan22Codec
    text_rules: ClassVar = {"embeds": "same"}
    sequence_plan: SequencePlan | None = SequencePlan()

    def __init__(self, path: str) -> None:
        super().__init__(path)
        index = read_config(path, "", "model_index.json")
        transformer, vae = read_config(path, HIGH), read_config(path, "vae")
        self.components = (HIGH, LOW) if (index.get(LOW) or [None])[0] else (HIGH,)
        self.boundary = float(index.get("boundary_ratio") or 0.0)
        if len(self.components) > 1 and not 0 < self.boundary < 1:
            raise ValueError(f"model.path: {path}: two experts need a boundary_ratio in (0, 1), got {self.boundary}")
        self.expand_timesteps = bool(index.get("expand_timesteps"))
        self.channels = int(transformer["in_channels"])
        self.text_width = int(transformer["text_dim"])
        self.patch = tuple(transformer["patch_size"])
        self.spatial = int(vae.get("scale_factor_spatial", 8))
        self.shift = float(read_config(path, "scheduler", "scheduler_config.json").get("flow_shift", 1.0))

    def component_of(self, sigma: float) -> str:
        return HIGH if len(self.components) == 1 or 1000 * sigma >= 1000 * self.boundary else LOW

    def latent_shape(self, spec: Wan22Sampling) -> tuple[int, ...]:
        rows, columns = latent_grid(spec, self.spatial * self.patch[1])
        return self.channels, (spec.num_frames - 1) // TEMPORAL + 1, rows * self.patch[1], columns * self.patch[1]

    def sigmas(self, num_inference_steps: int, spec: Wan22Sampling) -> Tensor:
        return static_shift(self.shift, num_inference_steps)

    def inputs(self, latents: Tensor, sigma: Tensor, text: dict[str, Any], spec: Wan22Sampling) -> dict[str, Any]:
        timestep = sigma * 1000
        if self.expand_timesteps:
            tokens = latents.shape[2] * (latents.shape[3] // self.patch[1]) * (latents.shape[4] // self.patch[2])
            timestep = timestep[:, None].expand(-1, tokens)
        return {"timestep": timestep, "encoder_hidden_states": text["embeds"]}

    def scale(self, spec: Wan22Sampling, component: str) -> float:
        second = spec.guidance_scale_2
        return second if component == LOW and second is not None else spec.guidance_scale

    def blank_text(self, spec: Wan22Sampling) -> dict[str, Tensor]:
        return {"embeds": torch.zeros(spec.max_sequence_length, self.text_width)}
