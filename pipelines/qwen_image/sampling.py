"""What a recipe may say about a Qwen-Image sample."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from omni_async.families import MediaShape, SamplingSpec

Side = Annotated[int, Meta(ge=16, le=16_384, multiple_of=16)]


class QwenImageSampling(SamplingSpec, frozen=True, kw_only=True):
    height: Annotated[Side, Meta(description="Image height in pixels.")] = 512
    width: Annotated[Side, Meta(description="Image width in pixels.")] = 512
    true_cfg_scale: Annotated[
        float, Meta(ge=1, le=1000, description="True classifier-free guidance; 1 switches it off.")
    ] = 1.0
    negative_prompt: Annotated[str, Meta(description="The unconditional branch's prompt when true_cfg_scale > 1.")] = (
        " "
    )

    @property
    def guided(self) -> bool:
        return self.true_cfg_scale > 1

    def media(self) -> tuple[MediaShape, ...]:
        return (MediaShape("image", (3, self.height, self.width)),)
