"""Defines the keys of `rollout.sampling` for Stable Diffusion 3."""

from __future__ import annotations

from typing import Annotated

from omni_async.config.section import doc
from omni_async.families import MediaShape, SamplingSpec


class StableDiffusion3Sampling(SamplingSpec, frozen=True, kw_only=True):
    height: Annotated[int, doc("Image height in pixels.", ge=16, most=16_384, multiple_of=16)] = 512
    width: Annotated[int, doc("Image width in pixels.", ge=16, most=16_384, multiple_of=16)] = 512
    guidance_scale: Annotated[float, doc("Classifier-free guidance; 1 switches it off.", ge=1, most=1000)] = 1.0
    negative_prompt: Annotated[str, doc("The unconditional branch's prompt when guidance_scale > 1.")] = ""
    max_sequence_length: Annotated[
        int, doc("T5 tokens of a prompt; longer ones are cut, as diffusers does.", ge=1, le=512)
    ] = 256

    @property
    def guided(self) -> bool:
        return self.guidance_scale > 1

    def media(self) -> tuple[MediaShape, ...]:
        return (MediaShape("image", (3, self.height, self.width)),)
