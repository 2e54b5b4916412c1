"""Scores which image people would prefer: HPSv2 (Wu et al. 2023, arXiv:2306.09341, section 4).

A CLIP model (ViT-H/14) trained on ranked images of a prompt; value = cosine, as the authors' package reports it. As in
that package, an image that is not square is padded with black, not cropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from omni_async.rewards.scorers.clip import PromptAlignmentScorer
from omni_async.types import Score

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from omni_async.media import Media


class HpsV2Scorer(PromptAlignmentScorer):
    """A scorer with value = cosine, in [-1, 1]."""

    name = "hps_v2"

    def _shown(self, media: Sequence[Media]) -> list[list[NDArray[np.uint8]]]:
        return [[_square(frame) for frame in some] for some in super()._shown(media)]

    def _judge(self, cosines: NDArray[np.float64]) -> Score:
        return Score(float(cosines.mean()))


def _square(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    height, width = frame.shape[:2]
    side = max(height, width)
    above, left = (side - height) // 2, (side - width) // 2
    return np.pad(frame, ((above, side - height - above), (left, side - width - left), (0, 0)))
