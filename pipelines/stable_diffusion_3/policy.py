"""Computes conditioning, latent shape and velocity of Stable Diffusion 3.

They are those of diffusers' `StableDiffusion3Pipeline`.

Latents are (C, H / 8, W / 8), C = 16. The transformer is fed 1000 sigma. diffusers and transformers, which take seconds
to import, are imported when a model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from tensordict import TensorDict

from omni_async.conditioning import stack_rows
from omni_async.media import Media
from omni_async.policy import OwnExchange, SequencePlan
from omni_async.sde.schedules import OTHER_SCHEDULES, refuse_options, static_shift
from omni_async.types import Prompt
from pipelines.parts import (
    DiffusersPolicy,
    as_images,
    branches,
    guided,
    load_part,
    load_tokenizer,
    read_config,
    stack_images,
)
from pipelines.stable_diffusion_3.sampling import StableDiffusion3Sampling

CONDITIONING = ("prompt_embeds", "prompt_pooled", "negative_prompt_embeds", "negative_prompt_pooled")
PATCH = 2
CLIP_TOKENS = 77


class StableDiffusion3Policy(DiffusersPolicy):
    """A policy, see `omni_async.policy.Policy`.

    Conditioning: `prompt_embeds` (77 + max_sequence_length, E) and `prompt_pooled` (P,), and with an unconditional
    branch `negative_prompt_embeds` and `negative_prompt_pooled`."""

    denoiser = "SD3Transformer2DModel"
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
        n = self.pixels_per_latent * PATCH
        if spec.height % n or spec.width % n:
            raise ValueError(f"height and width must be multiples of {n}, got {spec.height} x {spec.width}")
        return self.in_channels, spec.height // self.pixels_per_latent, spec.width // self.pixels_per_latent

    def sigmas(self, num_inference_steps: int, spec: StableDiffusion3Sampling) -> torch.Tensor:
        refuse_options(self.scheduler_config, "use_dynamic_shifting", *OTHER_SCHEDULES, "shift_terminal")
        return static_shift(self.scheduler_config.get("shift", 1.0), num_inference_steps)

    def velocity(
        self,
        components: Mapping[str, torch.nn.Module],
        latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: TensorDict,
        spec: StableDiffusion3Sampling,
        *,
        unconditional_gradient: bool = True,
    ) -> torch.Tensor:
        transformer = components["transformer"]
        inputs = latents.to(next(transformer.parameters()).dtype)
        timestep = sigma.to(inputs.device) * 1000

        def predict(branch: str) -> torch.Tensor:
            v: torch.Tensor = transformer(
                hidden_states=inputs,
                timestep=timestep,
                encoder_hidden_states=conditioning[f"{branch}_embeds"].to(inputs.device, inputs.dtype),
                pooled_projections=conditioning[f"{branch}_pooled"].to(inputs.device, inputs.dtype),
                return_dict=False,
            )[0]
            return v.float()

        return guided(predict, conditioning, "guidance_scale", spec.guidance_scale, unconditional_gradient)

    def stack_conditioning(self, rows: list[TensorDict]) -> TensorDict:
        """Stack conditioning, which has one length for every prompt of a spec."""
        return stack_rows(rows, dict.fromkeys(CONDITIONING, "same"))

    def blank_conditioning(self, spec: StableDiffusion3Sampling) -> TensorDict:
        fields = {}
        for branch in branches(spec.guided):
            fields[f"{branch}_embeds"] = torch.zeros(CLIP_TOKENS + spec.max_sequence_length, self.text_width)
            fields[f"{branch}_pooled"] = torch.zeros(self.pooled_width)
        return TensorDict(fields, batch_size=[])

    def load_codec(self, dtype: torch.dtype) -> StableDiffusion3Codec:
        from diffusers import AutoencoderKL
        from transformers import CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel, T5Tokenizer

        clip, t5 = (CLIPTokenizer, CLIPTextModelWithProjection), (T5Tokenizer, T5EncoderModel)
        parts: dict[str, Any] = {}
        for number, (tokenizer, encoder) in {"": clip, "_2": clip, "_3": t5}.items():
            parts[f"tokenizer{number}"] = load_tokenizer(tokenizer, self.path, f"tokenizer{number}")
            parts[f"text_encoder{number}"] = load_part(encoder, self.path, f"text_encoder{number}", dtype)
        return StableDiffusion3Codec(vae=load_part(AutoencoderKL, self.path, "vae", dtype), **parts)


class StableDiffusion3Codec:
    """A codec, see `omni_async.policy.Codec`, around diffusers' pipeline, which encodes prompts.

    The parts may be diffusers' or vLLM-Omni's: they have the same interface."""

    def __init__(self, *, vae: Any, **text_parts: Any) -> None:
        from diffusers import StableDiffusion3Pipeline

        self.vae = vae
        self._encoder: Any = StableDiffusion3Pipeline(transformer=None, scheduler=None, vae=vae, **text_parts)
        self._encoders = [part for name, part in text_parts.items() if name.startswith("text_encoder")]

    def to(self, device: Any) -> Self:
        for part in (self.vae, *self._encoders):
            part.to(device)
        return self

    @torch.no_grad()
    def encode(self, prompt: Prompt, spec: StableDiffusion3Sampling) -> TensorDict:
        embeds, negative_embeds, pooled, negative_pooled = self._encoder.encode_prompt(
            prompt.text,
            None,
            None,
            device=self.vae.device,
            negative_prompt=spec.negative_prompt,
            do_classifier_free_guidance=spec.guided,
            max_sequence_length=spec.max_sequence_length,
        )
        fields = {"prompt_embeds": embeds[0], "prompt_pooled": pooled[0]}
        if spec.guided:
            fields |= {"negative_prompt_embeds": negative_embeds[0], "negative_prompt_pooled": negative_pooled[0]}
        return TensorDict(fields, batch_size=[])

    @torch.no_grad()
    def decode(self, latents: torch.Tensor, spec: StableDiffusion3Sampling) -> list[Media]:
        config = self.vae.config
        maps = (latents / config.scaling_factor + config.shift_factor).to(self.vae.device, self.vae.dtype)
        return as_images(self.vae.decode(maps, return_dict=False)[0])

    @torch.no_grad()
    def encode_media(self, media: list[Media], spec: StableDiffusion3Sampling) -> torch.Tensor:
        config = self.vae.config
        images = stack_images(media, spec).to(self.vae.device).to(self.vae.dtype)
        latents: torch.Tensor = self.vae.encode(images).latent_dist.mode().float()
        return (latents - config.shift_factor) * config.scaling_factor
