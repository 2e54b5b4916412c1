"""Defines the keys of `rollout.sampling` for Z-Image."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from omni_async.config.section import doc
from omni_async.plugins.families import EncodedText
from omni_async_pipelines.sampling import ImageSampling, read_config

CAPTION_TOKENS = 32  # a caption takes a multiple of so many positions
PIXELS_PER_TOKEN = 16


class ZImageSampling(ImageSampling, frozen=True, kw_only=True):
    guidance_scale: Annotated[
        float,
        doc("Classifier-free guidance, counted from 0, which switches it off: 4 is 5 elsewhere.", ge=0, most=1000),
    ] = 0.0
    negative_prompt: Annotated[str, doc("The unconditional branch's prompt when guidance_scale > 0.")] = ""
    max_sequence_length: Annotated[
        int, doc("Tokens of a prompt, chat template included; longer ones are cut.", ge=1, le=1024)
    ] = 512

    @property
    def guided(self) -> bool:
        return self.guidance_scale > 0

    def encoded_texts(self, text: str, images: int) -> tuple[EncodedText, ...]:
        length = self.max_sequence_length
        return (EncodedText(tokenizer="tokenizer", cls="AutoTokenizer", chat=(("user", text),), most=length),)

    def problem(self, checkpoint: Path) -> str | None:
        """Find a side or a length that the transformer's position tables are too short for."""
        try:
            caption, rows, columns = map(int, read_config(checkpoint, "transformer")["axes_lens"])
        except (KeyError, TypeError, ValueError) as error:
            return f"height: {checkpoint} does not say how large its images may be ({error!r} in a config.json)"
        # The image's tokens follow the caption's, which begin at 1.
        most = {"max_sequence_length": (caption - 2) // CAPTION_TOKENS * CAPTION_TOKENS}
        most |= {"height": rows * PIXELS_PER_TOKEN, "width": columns * PIXELS_PER_TOKEN}
        for key, longest in most.items():
            if getattr(self, key) > longest:
                return f"{key}: this checkpoint's position table ends at {longest}, got {getattr(self, key)}"
        return None
