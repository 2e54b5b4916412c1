"""Computes conditioning, latent shape and velocity of HunyuanVideo-1.5 text-to-video.

All three follow diffusers' `HunyuanVideo15Pipeline`.

Latents are (C, (F - 1) / 4 + 1, H / 16, W / 16) of F frames, C = 32. The transformer takes 2 C + 1 channels, which
serve images as well: C of the sample, and C of an image with its mask, all zero here. Its time is 1000 sigma.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from omni_async.diffusion.sde.schedules import refuse_options, scheduler_sigmas
from omni_async.media import Media
from omni_async_pipelines.hunyuan_video_15.sampling import SPATIAL, TEMPORAL, HunyuanVideo15Sampling
from omni_async_pipelines.parts import DiffusersCodec, DiffusersPolicy, as_videos, latent_grid, stack_pixels
from omni_async_pipelines.sampling import read_config


class HunyuanVideo15Codec(DiffusersCodec):
    """A codec, see `omni_async.diffusion.policy.Codec`, around diffusers' pipeline, which encodes prompts."""

    def __init__(self, *, vae: Any, **text_parts: Any) -> None:
        from diffusers import HunyuanVideo15Pipeline

        super().__init__(vae=vae, **text_parts)
        pipeline: Any = HunyuanVideo15Pipeline
        self._encoder = pipeline(vae=vae, transformer=None, scheduler=None, guider=None, **text_parts)

    def encode_text(self, text: str, spec: HunyuanVideo15Sampling) -> dict[str, Tensor]:
        """Return Qwen2.5-VL's states of the text, and ByT5's of its parts in double quotes."""
        embeds, mask, glyphs, glyph_mask = self._encoder.encode_prompt(text, device=self.vae.device)
        [embeds, mask], [glyphs, glyph_mask] = _without_padding(embeds, mask), _without_padding(glyphs, glyph_mask)
        return {"embeds": embeds, "mask": mask, "glyphs": glyphs, "glyph_mask": glyph_mask}

    def most_at_once(self, spec: HunyuanVideo15Sampling) -> int:
        return 1  # the VAE's attention has a mask for one video and fails on more

    @torch.no_grad()
    def decode(self, latents: Tensor, spec: HunyuanVideo15Sampling) -> list[Media]:
        maps = latents.to(self.vae.device, self.vae.dtype) / self.vae.config.scaling_factor
        return [m for one in maps.split(1) for m in as_videos(self.vae.decode(one, return_dict=False)[0], spec.fps)]

    @torch.no_grad()
    def encode_media(self, media: list[Media], spec: HunyuanVideo15Sampling) -> Tensor:
        frames = stack_pixels(media, spec).transpose(1, 2).to(self.vae.device, self.vae.dtype)
        maps = torch.cat([self.vae.encode(one).latent_dist.mode() for one in frames.split(1)])
        return maps.float() * self.vae.config.scaling_factor


def _without_padding(states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Cut one text's padding off, (1, L, E) and (1, L) to (n, E) and (n,) bool; if all is padding, a row stays.

    The transformer hides padding from everything, so its length affects only the time."""
    shown = mask[0].bool()  # given in the states' dtype, and bfloat16 counts only to 256
    length = max(1, int(shown.sum()))
    return states[0, :length].clone(), shown[:length].clone()


class HunyuanVideo15Policy(DiffusersPolicy):
    """A policy, see `omni_async.diffusion.policy.Policy`.

    Conditioning: `embeds` (L, E) and `mask` (L,) of the prompt and the negative one, and in the same way `glyphs` and
    `glyph_mask` of the quoted texts; without any, one masked row of zeros."""

    denoiser = "HunyuanVideo15Transformer3DModel"
    parts: ClassVar = {
        "tokenizer": "transformers.Qwen2Tokenizer",
        "tokenizer_2": "transformers.ByT5Tokenizer",
        "text_encoder": "transformers.Qwen2_5_VLTextModel",
        "text_encoder_2": "transformers.T5EncoderModel",
        "vae": "diffusers.AutoencoderKLHunyuanVideo15",
    }
    float32_parts: ClassVar = ("vae",)
    codec = HunyuanVideo15Codec
    text_rules: ClassVar = {"embeds": "pad", "mask": "pad", "glyphs": "pad", "glyph_mask": "pad"}
    rounds_time = True

    def __init__(self, path: str) -> None:
        super().__init__(path)
        transformer = read_config(path, "transformer")
        self.channels = int(read_config(path, "vae")["latent_channels"])
        self.text_widths = int(transformer["text_embed_dim"]), int(transformer["text_embed_2_dim"])
        self.image_width = int(transformer["image_embed_dim"])
        self.scheduler_config = read_config(path, "scheduler", "scheduler_config.json")

    def latent_shape(self, spec: HunyuanVideo15Sampling) -> tuple[int, ...]:
        return self.channels, (spec.num_frames - 1) // TEMPORAL + 1, *latent_grid(spec, SPATIAL)

    def sigmas(self, num_inference_steps: int, spec: HunyuanVideo15Sampling) -> Tensor:
        refuse_options(self.scheduler_config, "use_dynamic_shifting")
        return scheduler_sigmas(num_inference_steps, 1, self.scheduler_config)

    def inputs(
        self, latents: Tensor, sigma: Tensor, text: dict[str, Any], spec: HunyuanVideo15Sampling
    ) -> dict[str, Any]:
        return {
            "hidden_states": F.pad(latents, (0, 0) * 3 + (0, self.channels + 1)),
            "timestep": (sigma * 1000).to(latents.dtype),  # the embedding takes its dtype
            "encoder_hidden_states": text["embeds"],
            "encoder_attention_mask": text["mask"],
            "encoder_hidden_states_2": text["glyphs"],
            "encoder_attention_mask_2": text["glyph_mask"],
            "image_embeds": latents.new_zeros(len(latents), 1, self.image_width),  # masked, as they are all zero
        }

    def blank_text(self, spec: HunyuanVideo15Sampling) -> dict[str, Tensor]:
        embeds, glyphs = (torch.zeros(1, width) for width in self.text_widths)
        return {"embeds": embeds, "mask": torch.tensor([True]), "glyphs": glyphs, "glyph_mask": torch.tensor([False])}
