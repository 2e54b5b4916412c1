"""Defines the keys of `rollout.sampling` for Stable Diffusion 3."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from omni_async.config.section import doc
from omni_async.plugins.families import EncodedText
from omni_async_pipelines.sampling import ImageSampling, clip_texts, read_config


class StableDiffusion3Sampling(ImageSampling, frozen=True, kw_only=True):
    guidance_scale: Annotated[float, doc("Classifier-free guidance; 1 switches it off.", ge=1, most=1000)] = 1.0
    negative_prompt: Annotated[str, doc("The unconditional branch's prompt when guidance_scale > 1.")] = ""
    max_sequence_length: Annotated[
        int, doc("T5 tokens of a prompt; longer ones are cut, as diffusers does.", ge=1, le=512)
    ] = 256

    @property
    def guided(self) -> bool:
        return self.guidance_scale > 1

    def encoded_texts(self, text: str, images: int) -> tuple[EncodedText, ...]:
        t5 = EncodedText(tokenizer="tokenizer_3", cls="T5Tokenizer", text=text, most=self.max_sequence_length)
        return (*clip_texts(text, "tokenizer", "tokenizer_2"), t5)

    def problem(self, checkpoint: Path) -> str | None:
        """Find a side that the transformer's position table is too short for."""
        transformer, vae = (read_config(checkpoint, part) for part in ("transformer", "vae"))
        try:
            pixels_per_latent = 2 ** (len(vae["block_out_channels"]) - 1)
            longest = transformer["pos_embed_max_size"] * transformer["patch_size"] * pixels_per_latent
        except (KeyError, TypeError) as error:
            return f"height: {checkpoint} does not say how large its images may be ({error!r} in a config.json)"
        for key in ("height", "width"):
            if getattr(self, key) > longest:
                return f"{key}: this checkpoint's position table ends at {longest} pixels, got {getattr(self, key)}"
        return None
