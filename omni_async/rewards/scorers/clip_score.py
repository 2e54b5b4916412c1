"""Scores how well an image fits its prompt: CLIPScore (Hessel et al. 2021, arXiv:2104.08718, section 3).

value = 2.5 max(cosine, 0), for the unchanged prompt: the paper puts "A photo depicts" before its captions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from omni_async.rewards.scorers.clip import PromptAlignmentScorer
from omni_async.types import Score

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WEIGHT = 2.5


class ClipScoreScorer(PromptAlignmentScorer):
    """A scorer with value in [0, 2.5]. Part: `cosine`, which may be below 0."""

    name = "clip_score"

    def _judge(self, cosines: NDArray[np.float64]) -> Score:
        parts: dict[str, Any] = {"cosine": float(cosines.mean())}
        return Score(float(np.maximum(cosines, 0.0).mean()) * _WEIGHT, parts)
