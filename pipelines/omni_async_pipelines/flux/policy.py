"""Computes conditioning, latent shape and velocity of FLUX.1.

All three follow diffusers' `FluxPipeline`.

Latents are packed: T = (H / 16) * (W / 16) tokens of C = 64 channels (2 x 2 patches of 16 VAE channels). The
transformer takes sigma itself and, for [dev], the guidance scale: a log-probability is for one scale.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from omni_async.diffusion.sde.schedules import scheduler_sigmas
from omni_async_pipelines.flux.sampling import FluxSampling
from omni_async_pipelines.parts import DiffusersPolicy, ImageCodec, latent_grid, pack_patches, unpack_patches
from omni_async_pipelines.sampling import read_config

DEFAULT_GUIDANCE = 3.5


class FluxCodec(ImageCodec):
    """A codec, see `omni_async.diffusion.policy.Codec`.

    It calls the encoders itself, because vLLM-Omni's T5 takes other arguments than the T5 that diffusers' pipeline
    calls."""

    def __init__(self, *, vae: Any, **text_parts: Any) -> None:
        super().__init__(vae=vae, **text_parts)
        self._text_parts = text_parts
        self._pixels_per_token = 2 ** len(vae.config.block_out_channels)

    def encode_text(self, text: str, spec: FluxSampling) -> dict[str, Tensor]:
        """Return T5's states, padding included and not masked, and CLIP's pooled states."""

        def run(which: str, length: int) -> Any:
            tokenizer, encoder = (self._text_parts[part + which] for part in ("tokenizer", "text_encoder"))
            tokens = tokenizer(text, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
            return encoder(tokens.input_ids.to(self.vae.device))

        pooled = run("", self._text_parts["tokenizer"].model_max_length).pooler_output
        return {"embeds": run("_2", spec.max_sequence_length)[0][0], "pooled": pooled[0]}

    def to_maps(self, latents: Tensor, spec: FluxSampling) -> Tensor:
        return unpack_patches(latents, *latent_grid(spec, self._pixels_per_token))

    def from_maps(self, maps: Tensor) -> Tensor:
        return pack_patches(maps)


class FluxPolicy(DiffusersPolicy):
    """A policy, see `omni_async.diffusion.policy.Policy`.

    Conditioning: `embeds` (max_sequence_length, E) and `pooled` (P,) of the prompt and the negative one."""

    denoiser = "FluxTransformer2DModel"
    parts: ClassVar = {
        "tokenizer": "transformers.CLIPTokenizer",
        "tokenizer_2": "transformers.T5Tokenizer",
        "text_encoder": "transformers.CLIPTextModel",
        "text_encoder_2": "transformers.T5EncoderModel",
        "vae": "diffusers.AutoencoderKL",
    }
    codec = FluxCodec
    text_rules: ClassVar = {"embeds": "same", "pooled": "same"}
    guidance = "true_cfg_scale"

    def __init__(self, path: str) -> None:
        super().__init__(path)
        transformer = read_config(path, "transformer")
        self.channels = int(transformer["in_channels"])
        self.text_widths = int(transformer["joint_attention_dim"]), int(transformer["pooled_projection_dim"])
        self.takes_guidance = bool(transformer.get("guidance_embeds"))
        self.pixels_per_token = 2 ** len(read_config(path, "vae")["block_out_channels"])
        self.scheduler_config = read_config(path, "scheduler", "scheduler_config.json")

    def latent_shape(self, spec: FluxSampling) -> tuple[int, ...]:
        rows, columns = latent_grid(spec, self.pixels_per_token)
        return rows * columns, self.channels

    def sigmas(self, num_inference_steps: int, spec: FluxSampling) -> Tensor:
        return scheduler_sigmas(num_inference_steps, self.latent_shape(spec)[0], self.scheduler_config)

    def inputs(self, latents: Tensor, sigma: Tensor, text: dict[str, Any], spec: FluxSampling) -> dict[str, Any]:
        scale = DEFAULT_GUIDANCE if spec.guidance_scale is None else spec.guidance_scale
        grid = (torch.arange(float(n), device=latents.device) for n in (1, *latent_grid(spec, self.pixels_per_token)))
        return {
            "timestep": sigma,
            "guidance": torch.full_like(sigma, scale) if self.takes_guidance else None,
            "encoder_hidden_states": text["embeds"],
            "pooled_projections": text["pooled"],
            "img_ids": torch.cartesian_prod(*grid),
            "txt_ids": torch.zeros(text["embeds"].shape[1], 3, device=latents.device),
        }

    def blank_text(self, spec: FluxSampling) -> dict[str, Tensor]:
        width, pooled_width = self.text_widths
        return {"embeds": torch.zeros(spec.max_sequence_length, width), "pooled": torch.zeros(pooled_width)}
