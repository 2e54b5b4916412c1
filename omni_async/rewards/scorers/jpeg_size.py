"""Scores compressibility: the size of the image as a JPEG (Black et al. 2023, DDPO, arXiv:2305.13301, section 5).

Cheap, and rarely ties.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Annotated, Literal

import PIL
from msgspec import Meta
from PIL import Image

from omni_async.rewards.base import Scorer
from omni_async.types import Prompt, Score

if TYPE_CHECKING:
    import numpy as np

    from omni_async.media import Media


class JpegSizeScorer(Scorer):
    """A scorer with value = +-scale x size in kB (1000 bytes); `sign: min` rewards small files, `max` large ones.

    Part: `jpeg_kb`."""

    name = "jpeg_size"
    accepts = ("image",)
    deterministic = True

    def __init__(
        self,
        *,
        quality: Annotated[int, Meta(ge=1, le=95)] = 95,
        sign: Literal["min", "max"] = "min",
        scale: Annotated[float, Meta(gt=0)] = 1.0,
    ) -> None:
        self.version = f"pillow {PIL.__version__}"
        self._quality = quality
        self._factor = scale if sign == "max" else -scale

    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        sizes = [self._kilobytes(one.pixels) for one in media]
        return [Score(value=self._factor * size, parts={"jpeg_kb": size}) for size in sizes]

    def _kilobytes(self, image: np.ndarray) -> float:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, format="JPEG", quality=self._quality)
        return buffer.tell() / 1000
