"""Scores how similar consecutive frames of a video are to CLIP, so that the subject and the scene stay the same.

value = mean of the cosines between the image embeddings of each scored frame and the next, in [-1, 1]. A repeated still
image has the highest value. So combine it with `motion_smoothness`, which gives a still image nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
from msgspec import Meta

from omni_async.rewards.base import ScoreError, describe
from omni_async.rewards.scorers.clip import ClipScorer
from omni_async.rewards.scorers.model_scorer import Count
from omni_async.rewards.scorers.pretrained import Precision, per_sample
from omni_async.types import Prompt, Score

if TYPE_CHECKING:
    from omni_async.media import Media


class FrameConsistencyScorer(ClipScorer):
    """A scorer of videos. Part: `lowest`, the lowest of the cosines, which shows a cut."""

    name = "frame_consistency"
    accepts = ("video",)

    def __init__(
        self,
        *,
        path: str,
        processor: str | None = None,
        dtype: Precision = "float32",
        frames: Annotated[int, Meta(ge=2)] = 8,
        batch: Count = 32,
        device: str,
    ) -> None:
        super().__init__(path=path, processor=processor, dtype=dtype, frames=frames, batch=batch, device=device)

    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        for position, (one, prompt) in enumerate(zip(media, prompts, strict=True)):
            if len(one.video) < 2:
                raise ScoreError(f"{describe(position, prompt)}: a video of one frame has no next one")
        shown = self._shown(media)
        rows = self._embedded(shown).astype(np.float64)
        cosines = [(some[:-1] * some[1:]).sum(axis=1) for some in per_sample(rows, shown)]
        return [Score(float(some.mean()), {"lowest": float(some.min())}) for some in cosines]
