"""Scores how similar consecutive frames of a video are to CLIP, so that the subject and the scene stay the same.

value = mean of the cosines between the image embeddings of each scored frame and the next, in [-1, 1]. A repeated still
image has the highest value. So combine it with `motion_smoothness`, which gives a still image nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from msgspec import Meta

from omni_async.rewards.base import ScoreError, describe
from omni_async.rewards.scorers.clip import Clip, frames_of, missing_clip
from omni_async.rewards.scorers.pretrained import Precision, per_sample
from omni_async.types import Prompt, Score

if TYPE_CHECKING:
    from omni_async.media import Media


class FrameConsistencyScorer:
    """A scorer of videos. Part: `lowest`, the lowest of the cosines, which shows a cut.

    Its parameters are as in `PromptAlignmentScorer`."""

    name = "frame_consistency"
    accepts = ("video",)
    cost = "model"
    deterministic = True

    def __init__(
        self,
        *,
        path: str,
        processor: str | None = None,
        dtype: Precision = "float32",
        frames: Annotated[int, Meta(ge=2)] = 8,
        batch: Annotated[int, Meta(ge=1)] = 32,
        device: str,
    ) -> None:
        self._frames = frames
        self._clip = Clip(path, processor, device, dtype, batch)
        self.version = self._clip.version

    @staticmethod
    def check_params(params: dict[str, Any]) -> str | None:
        """Require the checkpoint's files."""
        return missing_clip(params)

    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        for position, (one, prompt) in enumerate(zip(media, prompts, strict=True)):
            if len(one.video) < 2:
                raise ScoreError(f"{describe(position, prompt)}: a video of one frame has no next one")
        frames = [frames_of(one, self._frames) for one in media]
        rows = self._clip.images([frame for some in frames for frame in some]).astype(np.float64)
        cosines = [(some[:-1] * some[1:]).sum(axis=1) for some in per_sample(rows, frames)]
        return [Score(float(some.mean()), {"lowest": float(some.min())}) for some in cosines]
