"""Scores how smoothly a video moves, from how well each frame fits between its neighbours.

With frames x_1 ... x_F in [0, 1], and differences and second differences between them,

    d_t = x_{t+1} - x_t,    a_t = d_{t+1} - d_t,    smoothness = 1 - sum |a_t|^2 / sum (|d_t| + |d_{t+1}|)^2

which is in [0, 1] by the triangle inequality:

- 1 if every pixel changes at a constant rate
- 1/2 if consecutive changes are equally large and unrelated
- 1/4 for frames of independent noise
- 0 if the next change reverses every change (flicker)

It is a ratio of changes, so it does not depend on the amount of change. It compares pixels, so an object that moves
farther per frame than its soft edges are wide counts as 1/2 at most.

A static video is perfectly smooth but has no motion, and compression noise or rounding would decide its ratio. So the
value is smoothness * min(1, motion / `min_motion`), with motion the root mean square of all d_t, in grey levels of 255.
A repeated still image scores 0; motion above `min_motion` earns nothing more.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

import numpy as np
from msgspec import Meta

from omni_async.rewards.base import ScoreError, Scorer, describe
from omni_async.types import Prompt, Score

if TYPE_CHECKING:
    from omni_async.media import Media

_FEWEST = 3  # frames that have a second difference


class MotionSmoothnessScorer(Scorer):
    """A scorer with value in [0, 1], higher is smoother.

    Parts: `smoothness`, before the guard, and `motion` in grey levels. `min_motion`: the grey levels of motion below
    which smoothness counts less, in proportion."""

    name = "motion_smoothness"
    accepts = ("video",)
    deterministic = True

    def __init__(self, *, min_motion: Annotated[float, Meta(gt=0, le=255)] = 1.0) -> None:
        self._min_motion = min_motion

    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        return [self._score(one, i, prompt) for i, (one, prompt) in enumerate(zip(media, prompts, strict=True))]

    def _score(self, media: Media, position: int, prompt: Prompt) -> Score:
        frames = np.asarray(media.video)
        if len(frames) < _FEWEST:
            raise ScoreError(
                f"{describe(position, prompt)}: a video of {len(frames)} frames has no"
                f" smoothness, expected {_FEWEST} or more"
            )
        smoothness, motion = smoothness_and_motion(frames)
        value = smoothness * min(1.0, motion / self._min_motion)
        return Score(value, {"smoothness": smoothness, "motion": motion})


def smoothness_and_motion(frames: np.ndarray) -> tuple[float, float]:
    """Return the smoothness in [0, 1] and the motion, in grey levels, of uint8 (F, ...) with F >= 3.

    A static video has smoothness 1 and motion 0."""
    # Frame by frame, in whole numbers: a video in float64 would take eight times its memory.
    squares = bends = bounds = 0.0
    before: np.ndarray | None = None
    for earlier, later in pairwise(frames):
        change = (later.astype(np.int16) - earlier).ravel().astype(np.float32)
        size = _norm(change)
        squares += size**2
        if before is not None:
            bends += _norm(change - before) ** 2
            bounds += (size + _norm(before)) ** 2
        before = change
    motion = (squares / (len(frames) - 1) / frames[0].size) ** 0.5
    smoothness = 1.0 if bounds == 0 else 1.0 - bends / bounds
    return min(1.0, max(0.0, smoothness)), motion


def _norm(values: np.ndarray) -> float:
    return float(np.sum(np.square(values), dtype=np.float64)) ** 0.5
