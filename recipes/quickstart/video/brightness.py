"""Scores whether a video gets brighter or darker as its prompt asks: something that no single frame can show.

With m_t the mean grey level of frame t, and s = 1 or -1 for a prompt whose `target` is "brighter" or "darker",

    value = sum max(0, s (m_{t+1} - m_t)) / sum |m_{t+1} - m_t| * min(1, sum |m_{t+1} - m_t| / `min_change`)

which lies in [0, 1]: 1 where every change goes the way that was asked for, 0 where none does, 1/2 on average where the
video does not depend on the prompt, and 0 for a still image.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from omni_async.types import Prompt, Score

SIGNS = {"brighter": 1, "darker": -1}


class BrightnessScorer:
    """A scorer of videos. Part: `change`, the sum of all changes between frames in grey levels of 255.

    min_change: the grey levels of change below which the direction counts less, in proportion.
    permuted: a control that cannot learn. A sample gets the value of the one that was drawn so many samples of its
        prompt earlier, so every value is given once, to a sample that did not earn it; the first ones get random
        numbers. Give it `rollout.group_size`, let one reward worker score, and `data.shuffle: false` keep two groups of
        a prompt apart. Held-out prompts (`"held_out": true`) are scored as ever."""

    name = "brightness"
    accepts = ("video",)

    def __init__(
        self, *, min_change: Annotated[float, Meta(gt=0, le=255)] = 10.0, permuted: Annotated[int, Meta(ge=0)] = 0
    ) -> None:
        self._min_change = min_change
        rng = random.Random(0)
        self._earlier: defaultdict[int, deque[float]] = defaultdict(
            lambda: deque(rng.random() for _ in range(permuted))
        )
        self._permuted = permuted

    @staticmethod
    def check_prompt(prompt: Prompt, params: dict[str, Any]) -> str | None:
        return None if prompt.target in SIGNS else f"the prompt's target is {prompt.target!r}, not brighter or darker"

    def score(self, media: list[Any], prompts: list[Prompt]) -> list[Score]:
        return [self._score(one.frames, prompt) for one, prompt in zip(media, prompts, strict=True)]

    def _score(self, frames: np.ndarray, prompt: Prompt) -> Score:
        changes = np.diff(frames.reshape(len(frames), -1).mean(axis=1)) * SIGNS[prompt.target or ""]
        change = float(np.abs(changes).sum())
        value = float(changes.clip(min=0).sum()) / max(change, self._min_change)
        if self._permuted and not prompt.metadata.get("held_out"):
            self._earlier[prompt.index].append(value)
            value = self._earlier[prompt.index].popleft()
        return Score(value, {"change": change})
