"""Defines the keys of `rollout.sampling` for Qwen-Omni models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar

from omni_async.config.section import doc
from omni_async.plugins.families import EncodedText, MediaShape, SamplingSpec
from omni_async_pipelines.sampling import read_config

_MOST_ELONGATED = 200  # the processor's largest ratio of the longer to the shorter side
_PUBLISHED_CONTEXT = 32_768  # the default of transformers, which a config.json may leave out
PAIR = 2  # frames that become one frame of tokens


class QwenOmniSampling(SamplingSpec, frozen=True, kw_only=True):
    # Placeholders of media: in a text, each would make the model look for one more medium.
    media_tokens: ClassVar[tuple[str, ...]] = ("<|IMAGE|>", "<|AUDIO|>", "<|VIDEO|>")

    max_tokens: Annotated[
        int, doc("The largest number of tokens of an answer, its end token included.", ge=1, most=1_000_000)
    ] = 1024
    temperature: Annotated[
        float,
        doc(
            "Divides the logits, for engines and trainer. Answers are drawn from all tokens: there is no `top_p` and no"
            " `top_k`, whose log-probabilities would belong to another distribution than the trainer's.",
            gt=0,
            most=100,
        ),
    ] = 1.0
    system: Annotated[str | None, doc("The system message; null: the chat template's default.")] = None
    video_fps: Annotated[
        float,
        doc("Frames a second that are read of a video: 2 divided by a whole number.", ge=0.01, most=PAIR),
    ] = 2.0
    video_frames: Annotated[
        int,
        doc(
            "The most frames of a video. While one of a prompt's videos would have more, the distance between the"
            " frames of all is doubled.",
            ge=2,
            most=768,
        ),
    ] = 32
    video_pixels: Annotated[
        int,
        doc(
            "The most pixels of a frame. Larger frames are reduced; transformers' processor then takes 128 to 768"
            " tokens for each pair of frames.",
            ge=784,
            most=786_432,
        ),
    ] = 602_112

    def __post_init__(self) -> None:
        if not math.isclose(PAIR / self.video_fps, PAIR * self.video_step):
            raise ValueError(f"video_fps: expected 2 divided by a whole number, got {self.video_fps:g}")

    @property
    def video_step(self) -> float:
        """The seconds between two frames of a video: half a whole number, so that positions in time are exact."""
        return round(PAIR / self.video_fps) / PAIR

    @property
    def most_tokens(self) -> int:
        return self.max_tokens

    def media(self) -> tuple[MediaShape, ...]:
        return (MediaShape("text", ()),)

    def context(self, checkpoint: Path) -> int:
        return context_of(read_config(checkpoint, ""))

    def encoded_texts(self, text: str, images: int) -> tuple[EncodedText, ...]:
        whole = text if self.system is None else f"{self.system}\n{text}"
        return (EncodedText(tokenizer="", cls="Qwen2Tokenizer", text=whole, most=None, cut=False),)

    def problem(self, checkpoint: Path) -> str | None:
        """Find a `max_tokens` that leaves no place for a prompt."""
        context = self.context(checkpoint)
        if self.max_tokens < context:
            return None
        return f"max_tokens: prompt and answer share the model's context of {context} tokens, got {self.max_tokens}"

    def refused(self, text: str, images: tuple[tuple[int, int], ...]) -> str | None:
        """Find a token of media in the text, and an image that is too narrow."""
        for width, height in images:
            if max(width, height) > _MOST_ELONGATED * min(width, height):
                size = f"{width} x {height} pixels"
                return f"image: {size} are too narrow: a side may be {_MOST_ELONGATED} times the other at most"
        return self.media_token_in(text)

    def media_token_in(self, text: str) -> str | None:
        """Return why the model cannot read a text that holds a token of media; None if it holds none."""
        for token in self.media_tokens:
            if token in text:
                return f"prompt: it holds {token}, where the model would look for media; remove it"
        return None


def context_of(config: dict[str, Any]) -> int:
    """Return the most tokens of a sequence, from the content of a checkpoint's config.json."""
    text = config.get("thinker_config", {}).get("text_config", {})
    context: int = text.get("max_position_embeddings", _PUBLISHED_CONTEXT)
    return context
