"""Defines the keys of `rollout.sampling` for FLUX.1."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from omni_async.config.section import doc
from omni_async.plugins.families import EncodedText
from omni_async_pipelines.sampling import ImageSampling, clip_texts, read_config


class FluxSampling(ImageSampling, frozen=True, kw_only=True):
    guidance_scale: (
        Annotated[
            float,
            doc("Input of the transformer, one pass a step; null: 3.5, and none where it takes none.", ge=0, most=1000),
        ]
        | None
    ) = None
    true_cfg_scale: Annotated[
        float, doc("Classifier-free guidance besides, a second pass a step; 1 switches it off.", ge=1, most=1000)
    ] = 1.0
    negative_prompt: Annotated[str, doc("That of the second pass.")] = ""
    max_sequence_length: Annotated[int, doc("T5 tokens of a prompt; longer ones are cut.", ge=1, le=512)] = 512

    @property
    def guided(self) -> bool:
        return self.true_cfg_scale > 1

    def encoded_texts(self, text: str, images: int) -> tuple[EncodedText, ...]:
        t5 = EncodedText(tokenizer="tokenizer_2", cls="T5Tokenizer", text=text, most=self.max_sequence_length)
        return (*clip_texts(text, "tokenizer"), t5)

    def problem(self, checkpoint: Path) -> str | None:
        """Find a guidance that the transformer has no input for."""
        if self.guidance_scale is None or read_config(checkpoint, "transformer").get("guidance_embeds"):
            return None
        return f"guidance_scale: this checkpoint's transformer takes none, got {self.guidance_scale}; expected null"
