"""Defines the keys of `rollout.sampling` for Qwen-Image-Edit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from omni_async.config.section import doc
from omni_async.plugins.families import EncodedText
from omni_async_pipelines.qwen_image.sampling import QwenImageSampling, encoded

EDIT_TEMPLATE = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects,"
    " background), then explain how the user's text instruction should alter or modify the image. Generate a new image"
    " that meets the user's requirements while maintaining consistency with the original input where appropriate."
    "<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{}<|im_end|>\n<|im_start|>assistant\n"
)
NUM_EDIT_TEMPLATE_TOKENS = 64  # of the system part, and the user's first line
_SIDE = 32  # the sides of a prompt's image are multiples of this
_MOST_ELONGATED = 200  # the processor's largest ratio of the longer to the shorter side
# Tokens of the processor that the model would take for another image.
_SEEN = ("<|image_pad|>", "<|video_pad|>")


class QwenImageEditSampling(QwenImageSampling, frozen=True, kw_only=True):
    image_area: Annotated[
        int,
        doc(
            "Pixels to which a prompt's image is resized, whatever `height` and `width` are; it keeps about its"
            " proportions, and its sides become multiples of 32. The default is the published one.",
            ge=32 * 32,
            most=4096 * 4096,
        ),
    ] = 1024 * 1024

    @property
    def encoding_keys(self) -> tuple[str, ...]:
        return *super().encoding_keys, "image_area"

    def encoded_texts(self, text: str, images: int) -> tuple[EncodedText, ...]:
        return (encoded(EDIT_TEMPLATE, text, NUM_EDIT_TEMPLATE_TOKENS),) if images else super().encoded_texts(text, 0)

    def refused(self, text: str, images: tuple[tuple[int, int], ...]) -> str | None:
        """Find a token for an image in the text, and an image that is too narrow."""
        if not images:
            return None
        for token in _SEEN:
            if token in text:
                return f"prompt: it holds {token}, where the model would look for another image; remove it"
        for width, height in images:
            try:
                sides_of(width, height, self.image_area)
            except ValueError as error:
                return f"image: the image {error}"
        return None

    def shared_tokens(self, checkpoint: Path) -> int:
        # A prompt's image, whose sides are multiples of 32 pixels, adds a multiple of 4 tokens.
        return math.gcd(super().shared_tokens(checkpoint), 4)


def sides_of(width: int, height: int, area: int) -> tuple[int, int]:
    """Return the resized width and height of a prompt's image, in pixels: about `area` pixels in all.

    ValueError if it is too narrow for the model."""
    wide = math.sqrt(area * (width / height))
    across, down = (round(side / _SIDE) * _SIDE for side in (wide, wide / (width / height)))
    if not across or not down:
        raise ValueError(
            f"of {width} x {height} pixels is too narrow: at image_area {area} a side is shorter than half of {_SIDE}"
            " pixels"
        )
    if max(across, down) > _MOST_ELONGATED * min(across, down):
        raise ValueError(
            f"of {width} x {height} pixels is too narrow: a side may be {_MOST_ELONGATED} times the other at most"
        )
    return across, down
