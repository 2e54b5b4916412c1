"""What a recipe may say about a Qwen-Image sample."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from omni_async.config.section import doc
from omni_async.families import MediaShape, SamplingSpec


class QwenImageSampling(SamplingSpec, frozen=True, kw_only=True):
    height: Annotated[int, doc("Image height in pixels.", ge=16, most=16_384, multiple_of=16)] = 512
    width: Annotated[int, doc("Image width in pixels.", ge=16, most=16_384, multiple_of=16)] = 512
    true_cfg_scale: Annotated[float, doc("True classifier-free guidance; 1 switches it off.", ge=1, most=1000)] = 1.0
    negative_prompt: Annotated[str, doc("The unconditional branch's prompt when true_cfg_scale > 1.")] = " "

    @property
    def guided(self) -> bool:
        return self.true_cfg_scale > 1

    def shared_tokens(self, checkpoint: Path) -> int:
        return (self.height // 16) * (self.width // 16)

    def media(self) -> tuple[MediaShape, ...]:
        return (MediaShape("image", (3, self.height, self.width)),)
