"""Computes conditioning, latent shape and velocity of Stable Diffusion 3.

All three follow diffusers' `StableDiffusion3Pipeline`.

Latents are (C, H / 8, W / 8), C = 16. The transformer takes 1000 sigma.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from omni_async.diffusion.policy import OwnExchange, SequencePlan
from omni_async.diffusion.sde.schedules import OTHER_SCHEDULES, refuse_options, static_shift
from omni_async_pipelines.parts import DiffusersPolicy, ImageCodec, latent_grid
from omni_async_pipelines.sampling import read_config
from omni_async_pipelines.stable_diffusion_3.sampling import StableDiffusion3Sampling

PATCH = 2
CLIP_TOKENS = 77


class StableDiffusion3Codec(ImageCodec):
    """A codec, see `omni_async.diffusion.policy.Codec`, around diffusers' pipeline, which encodes prompts."""

    def __init__(self, *, vae: Any, **text_parts: Any) -> None:
        from diffusers import StableDiffusion3Pipeline

        super().__init__(vae=vae, **text_parts)
        self._encoder: Any = StableDiffusion3Pipeline(transformer=None, scheduler=None, vae=vae, **text_parts)

    def encode_text(self, text: str, spec: StableDiffusion3Sampling) -> dict[str, Tensor]:
        embeds, _, pooled, _ = self._encoder.encode_prompt(
            text,
            None,
            None,
            device=self.vae.device,
            do_classifier_free_guidance=False,
            max_sequence_length=spec.max_sequence_length,
        )
        return {"embeds": embeds[0], "pooled": pooled[0]}


class StableDiffusion3Policy(DiffusersPolicy):
    """A policy, see `omni_async.diffusion.policy.Policy`.

    Conditioning: `embeds` (77 + max_sequence_length, E) and `pooled` (P,) of the prompt and the negative one."""

    denoiser = "SD3Transformer2DModel"
    parts: ClassVar = {
        "tokenizer": "transformers.CLIPTokenizer",
        "tokenizer_2": "transformers.CLIPTokenizer",
        "tokenizer_3": "transformers.T5Tokenizer",
        "text_encoder": "transformers.CLIPTextModelWithProjection",
        "text_encoder_2": "transformers.CLIPTextModelWithProjection",
        "text_encoder_3": "transformers.T5EncoderModel",
        "vae": "diffusers.AutoencoderKL",
    }
    codec = StableDiffusion3Codec
    text_rules: ClassVar = {"embeds": "same", "pooled": "same"}
    sequence_plan: SequencePlan | None = SequencePlan(
        exchange=OwnExchange("transformer_blocks", ("hidden_states", "encoder_hidden_states"), "proj_out")
    )

    def __init__(self, path: str) -> None:
        super().__init__(path)
        transformer, vae = read_config(path, "transformer"), read_config(path, "vae")
        self.in_channels = int(transformer["in_channels"])
        self.text_width = int(transformer["joint_attention_dim"])
        self.pooled_width = int(transformer["pooled_projection_dim"])
        self.pixels_per_latent = 2 ** (len(vae["block_out_channels"]) - 1)
        self.scheduler_config = read_config(path, "scheduler", "scheduler_config.json")

    def latent_shape(self, spec: StableDiffusion3Sampling) -> tuple[int, ...]:
        rows, columns = latent_grid(spec, self.pixels_per_latent * PATCH)
        return self.in_channels, rows * PATCH, columns * PATCH

    def sigmas(self, num_inference_steps: int, spec: StableDiffusion3Sampling) -> Tensor:
        refuse_options(self.scheduler_config, "use_dynamic_shifting", *OTHER_SCHEDULES, "shift_terminal")
        return static_shift(self.scheduler_config.get("shift", 1.0), num_inference_steps)

    def inputs(
        self, latents: Tensor, sigma: Tensor, text: dict[str, Any], spec: StableDiffusion3Sampling
    ) -> dict[str, Any]:
        return {
            "timestep": sigma * 1000,
            "encoder_hidden_states": text["embeds"],
            "pooled_projections": text["pooled"],
        }

    def blank_text(self, spec: StableDiffusion3Sampling) -> dict[str, Tensor]:
        embeds = torch.zeros(CLIP_TOKENS + spec.max_sequence_length, self.text_width)
        return {"embeds": embeds, "pooled": torch.zeros(self.pooled_width)}
