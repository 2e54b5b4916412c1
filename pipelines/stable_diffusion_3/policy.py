"""Computes conditioning, latent shape and velocity of Stable Diffusion 3, as diffusers' `StableDiffusion3Pipeline`
does.

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
from omni_async.sde.schedules import static_shift
from omni_async.types import Prompt
from pipelines.parts import as_images, empty_part, load_part, load_tokenizer, read_config, stack_images
from pipelines.stable_diffusion_3.sampling import StableDiffusion3Sampling

CONDITIONING = ("prompt_embeds", "prompt_pooled", "negative_prompt_embeds", "negative_prompt_pooled")
PATCH = 2
CLIP_TOKENS = 77
# Options of the scheduler that would make another schedule than the one below.
_UNSUPPORTED = (
    "use_dynamic_shifting",
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "invert_sigmas",
    "shift_terminal",
)


class StableDiffusion3Policy:
    """A policy, see `omni_async.policy.Policy`. Conditioning: `prompt_embeds` (77 + max_sequence_length, E) and
    `prompt_pooled` (P,), and with an unconditional branch `negative_prompt_embeds` and `negative_prompt_pooled`."""

    components: tuple[str, ...] = ("transformer",)
    sequence_plan: SequencePlan | None = SequencePlan(
        exchange=OwnExchange("transformer_blocks", ("hidden_states", "encoder_hidden_states"), "proj_out")
    )

    def __init__(self, path: str) -> None:
        self.path = path
        transformer, vae = read_config(path, "transformer"), read_config(path, "vae")
        self.in_channels = int(transformer["in_channels"])
        self.text_width = int(transformer["joint_attention_dim"])
        self.pooled_width = int(transformer["pooled_projection_dim"])
        self.pixels_per_latent = 2 ** (len(vae["block_out_channels"]) - 1)
        self.scheduler_config = read_config(path, "scheduler", "scheduler_config.json")

    def load_components(self, dtype: torch.dtype) -> dict[str, torch.nn.Module]:
        from diffusers import SD3Transformer2DModel

        return {"transformer": load_part(SD3Transformer2DModel, self.path, "transformer", dtype)}

    def build_components(self, dtype: torch.dtype) -> dict[str, torch.nn.Module]:
        from diffusers import SD3Transformer2DModel

        return {"transformer": empty_part(SD3Transformer2DModel, self.path, "transformer", dtype)}

    def component_of(self, sigma: float) -> str:
        return "transformer"

    def latent_shape(self, spec: StableDiffusion3Sampling) -> tuple[int, ...]:
        n = self.pixels_per_latent * PATCH
        if spec.height % n or spec.width % n:
            raise ValueError(f"height and width must be multiples of {n}, got {spec.height} x {spec.width}")
        return self.in_channels, spec.height // self.pixels_per_latent, spec.width // self.pixels_per_latent

    def sigmas(self, num_inference_steps: int, spec: StableDiffusion3Sampling) -> torch.Tensor:
        for key in _UNSUPPORTED:
            if self.scheduler_config.get(key):
                raise ValueError(f"scheduler config: {key}={self.scheduler_config[key]!r} is not supported")
        return static_shift(self.scheduler_config.get("shift", 1.0), num_inference_steps, twice=True)

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

        cond = predict("prompt")
        if not spec.guided:
            return cond
        if "negative_prompt_embeds" not in conditioning:
            raise ValueError(f"guidance_scale = {spec.guidance_scale} needs conditioning with a negative prompt")
        with torch.set_grad_enabled(torch.is_grad_enabled() and unconditional_gradient):
            uncond = predict("negative_prompt")
        return uncond + spec.guidance_scale * (cond - uncond)

    def stack_conditioning(self, rows: list[TensorDict]) -> TensorDict:
        """Stacks conditioning, which has one length for every prompt of a spec."""
        return stack_rows(rows, dict.fromkeys(CONDITIONING, "same"))

    def blank_conditioning(self, spec: StableDiffusion3Sampling) -> TensorDict:
        fields = {}
        for branch in ("prompt", "negative_prompt") if spec.guided else ("prompt",):
            fields[f"{branch}_embeds"] = torch.zeros(CLIP_TOKENS + spec.max_sequence_length, self.text_width)
            fields[f"{branch}_pooled"] = torch.zeros(self.pooled_width)
        return TensorDict(fields, batch_size=[])

    def load_codec(self, dtype: torch.dtype) -> StableDiffusion3Codec:
        from diffusers import AutoencoderKL
        from transformers import CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel, T5Tokenizer

        def load(cls: Any, folder: str) -> Any:
            return load_part(cls, self.path, folder, dtype)

        return StableDiffusion3Codec(
            tokenizer=load_tokenizer(CLIPTokenizer, self.path, "tokenizer"),
            tokenizer_2=load_tokenizer(CLIPTokenizer, self.path, "tokenizer_2"),
            tokenizer_3=load_tokenizer(T5Tokenizer, self.path, "tokenizer_3"),
            text_encoder=load(CLIPTextModelWithProjection, "text_encoder"),
            text_encoder_2=load(CLIPTextModelWithProjection, "text_encoder_2"),
            text_encoder_3=load(T5EncoderModel, "text_encoder_3"),
            vae=load(AutoencoderKL, "vae"),
        )


class StableDiffusion3Codec:
    """A codec, see `omni_async.policy.Codec`, around diffusers' pipeline, which encodes prompts. The parts may be
    diffusers' or vLLM-Omni's: they have the same interface."""

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
