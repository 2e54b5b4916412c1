"""Defines the judge of these tests, `tests.commands.evaluation.judging:Brightness`; `calls` are the prompts that it was
asked about."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

from omni_async.media import Media
from omni_async.rewards.base import ScoreError
from omni_async.types import Prompt, Score

calls: list[Any] = []
impatient: list[int] = []  # presses Ctrl-C, in place of the user, when it has been asked so often


class Brightness:
    """Scores the mean of all pixels, and cannot score what should be unlucky."""

    name = "brightness"
    accepts = ("image",)

    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score | ScoreError]:
        calls.extend(prompts)
        if len(calls) in impatient:
            os.kill(os.getpid(), signal.SIGINT)
        return [self._score(one, prompt) for one, prompt in zip(media, prompts, strict=True)]

    def _score(self, one: Media, prompt: Prompt) -> Score | ScoreError:
        if prompt.text == "unlucky":
            return ScoreError("it is unlucky")
        pixels = np.asarray(one.image, np.float64)
        return Score(float(pixels.mean()), {"red": float(pixels[0].mean())}, prompt.target)
