"""Scores which image people would pick: PickScore (Kirstain et al. 2023, arXiv:2305.01569, section 3).

A CLIP model trained on choices between two images for a prompt, whose score is its logit, exp(logit scale) x cosine.
value = logit / 26, as in flow_grpo and Flow-Factory, so that published weights give values below 1; `weight: 26` gives
the logit itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from omni_async.rewards.scorers.clip import PromptAlignmentScorer
from omni_async.types import Score

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DIVISOR = 26.0


class PickScoreScorer(PromptAlignmentScorer):
    """A scorer with value = logit / 26. Part: `pick_score`, the logit."""

    name = "pick_score"

    def _judge(self, cosines: NDArray[np.float64]) -> Score:
        logit = self._clip.logit_scale * float(cosines.mean())
        return Score(logit / _DIVISOR, {"pick_score": logit})
