"""Defines the keys of `rollout.sampling` for Qwen-Image-Edit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from omni_async.config.section import doc
from pipelines.qwen_image.sampling import QwenImageSampling


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

    def shared_tokens(self, checkpoint: Path) -> int:
        # A prompt's image, whose sides are multiples of 32 pixels, adds a multiple of 4 tokens.
        return math.gcd(super().shared_tokens(checkpoint), 4)
