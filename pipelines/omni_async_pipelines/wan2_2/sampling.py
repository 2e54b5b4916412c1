"""Defines the keys of `rollout.sampling` for Wan2.2."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Annotated

from omni_async.config.section import doc
from omni_async.plugins.families import EncodedText, MediaShape, SamplingSpec
from omni_async_pipelines.sampling import read_config, require_frames

TEMPORAL = 4  # frames that become one latent frame, after the first


class Wan22Sampling(SamplingSpec, frozen=True, kw_only=True):
    height: Annotated[int, doc("Video height in pixels.", ge=16, most=16_384, multiple_of=16)] = 480
    width: Annotated[int, doc("Video width in pixels.", ge=16, most=16_384, multiple_of=16)] = 832
    num_frames: Annotated[int, doc("Frames of a video: 4k + 1.", ge=1, most=10_000)] = 81
    fps: Annotated[float, doc("Frames per second of the video file.", gt=0, most=1000)] = 16.0
    guidance_scale: Annotated[
        float,
        doc("Classifier-free guidance; of the first expert where there are two. 1 switches it off.", ge=1, most=1000),
    ] = 1.0
    guidance_scale_2: (
        Annotated[float, doc("That of the second expert, which takes the low noise; null: the same.", ge=1, most=1000)]
        | None
    ) = None
    negative_prompt: Annotated[str, doc("The unconditional branch's prompt where there is guidance.")] = ""
    max_sequence_length: Annotated[int, doc("UMT5 tokens of a prompt; longer ones are cut.", ge=1, le=512)] = 512

    def __post_init__(self) -> None:
        require_frames(self.num_frames, TEMPORAL)

    def encoded_texts(self, text: str, images: int) -> tuple[EncodedText, ...]:
        clean = " ".join(html.unescape(html.unescape(text)).split())  # as diffusers' pipeline does
        length = self.max_sequence_length
        return (EncodedText(tokenizer="tokenizer", cls="AutoTokenizer", text=clean, most=length),)

    def problem(self, checkpoint: Path) -> str | None:
        """Find a size that the checkpoint's VAE and patches do not divide, and a second scale for one expert."""
        try:
            n = _pixels_per_token(checkpoint)
        except (KeyError, TypeError, IndexError) as error:
            return f"height: {checkpoint} does not say what sizes it makes ({error!r} in a config.json)"
        for key in ("height", "width"):
            if getattr(self, key) % n:
                return f"{key}: this checkpoint makes multiples of {n}, got {getattr(self, key)}"
        if self.guidance_scale_2 is not None and not (checkpoint / "transformer_2").is_dir():
            return f"guidance_scale_2: this checkpoint has one expert, got {self.guidance_scale_2}; expected null"
        return None

    def shared_tokens(self, checkpoint: Path) -> int:
        n = _pixels_per_token(checkpoint)
        return ((self.num_frames - 1) // TEMPORAL + 1) * (self.height // n) * (self.width // n)

    @property
    def guided(self) -> bool:
        return max(self.guidance_scale, self.guidance_scale_2 or 1.0) > 1

    def media(self) -> tuple[MediaShape, ...]:
        return (MediaShape("video", (self.num_frames, 3, self.height, self.width), self.fps),)


def _pixels_per_token(checkpoint: Path) -> int:
    """Return the side of a token in pixels, by the configuration of the checkpoint's transformer and VAE."""
    n: int = read_config(checkpoint, "transformer")["patch_size"][1]
    return n * int(read_config(checkpoint, "vae").get("scale_factor_spatial", 8))
