"""Defines the keys of `rollout.sampling` for HunyuanVideo-1.5."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from omni_async.config.section import doc
from omni_async.plugins.families import EncodedText, MediaShape, SamplingSpec
from omni_async_pipelines.sampling import other_layout, require_frames

SPATIAL, TEMPORAL = 16, 4  # pixels, and frames after the first, that become one latent
# In diffusers' pipeline: tokens of the text encoder after the system message, of the system message, and of ByT5.
_TEXT_TOKENS, _SYSTEM_TOKENS, _GLYPH_TOKENS = 1000, 108, 256
_SYSTEM = """\
You are a helpful assistant. Describe the video by detailing the following aspects: \
        1. The main content and theme of the video. \
        2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects. \
        3. Actions, events, behaviors temporal relationships, physical movement changes of the objects. \
        4. background environment, light, style and atmosphere. \
        5. camera angles, movements, and transitions used in the video."""
_QUOTED = re.compile(r'"(.*?)"|“(.*?)”')
_LAYOUT = (
    ("vae", "spatial_compression_ratio", SPATIAL),
    ("vae", "temporal_compression_ratio", TEMPORAL),
    ("transformer", "patch_size", 1),
    ("transformer", "patch_size_t", 1),
    ("transformer", "use_meanflow", False),
)


class HunyuanVideo15Sampling(SamplingSpec, frozen=True, kw_only=True):
    height: Annotated[int, doc("Video height in pixels.", ge=16, most=16_384, multiple_of=16)] = 480
    width: Annotated[int, doc("Video width in pixels.", ge=16, most=16_384, multiple_of=16)] = 832
    fps: Annotated[float, doc("Frames per second of the video file.", gt=0, most=1000)] = 24.0
    num_frames: Annotated[int, doc("Frames of a video: 4k + 1.", ge=1, most=10_000)] = 121
    guidance_scale: Annotated[float, doc("Classifier-free guidance; 1 switches it off.", ge=1, most=1000)] = 1.0
    negative_prompt: Annotated[str, doc("The unconditional branch's prompt where there is guidance.")] = ""

    def __post_init__(self) -> None:
        require_frames(self.num_frames, TEMPORAL)

    def encoded_texts(self, text: str, images: int) -> tuple[EncodedText, ...]:
        chat = (("system", _SYSTEM), ("user", text or " "))
        seen = EncodedText(
            tokenizer="tokenizer", cls="Qwen2Tokenizer", chat=chat, most=_TEXT_TOKENS, dropped=_SYSTEM_TOKENS
        )
        quoted = dict.fromkeys(first or second for first, second in _QUOTED.findall(text))
        glyphs = "".join(f'Text "{one}". ' for one in quoted)
        drawn = EncodedText(tokenizer="tokenizer_2", cls="ByT5Tokenizer", text=glyphs, most=_GLYPH_TOKENS)
        return (seen, drawn) if quoted else (seen,)

    def problem(self, checkpoint: Path) -> str | None:
        """Find a part of another size than HunyuanVideo-1.5's, and a distilled model that takes two times a step."""
        other = other_layout(checkpoint, _LAYOUT)
        return f"num_frames: no samples are known of a checkpoint whose {other}" if other else None

    @property
    def guided(self) -> bool:
        return self.guidance_scale > 1

    def media(self) -> tuple[MediaShape, ...]:
        return (MediaShape("video", (self.num_frames, 3, self.height, self.width), self.fps),)
