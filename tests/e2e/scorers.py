"""Defines rewards that go wrong, named in recipes as `tests.e2e.scorers:Constant` and so on."""

from __future__ import annotations

import sys

import numpy as np

from omni_async.media import Media
from omni_async.types import Prompt, Score


class Constant:
    name = "constant"
    value = 0.5

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        return [Score(self.value) for _ in images]


class Brightness(Constant):
    """A reward that a pixel which is rounded otherwise does not move, where it may change a JPEG by bytes: the mean
    brightness in thousandths, of which such a pixel is one in about 800."""

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        return [Score(round(float(one.mean()) / 255, 3)) for one in images]


class Forgetful(Constant):
    """Scores 1 and the brightness; a prompt that is `hard` gets 0, `left` times, and no score from then on."""

    left = 0

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        return [self._score(image, prompt) for image, prompt in zip(images, prompts, strict=True)]

    def _score(self, image: np.ndarray, prompt: Prompt) -> Score:
        if not prompt.metadata.get("hard"):
            return Score(1.0 + 0.001 * float(image.mean()))
        Forgetful.left -= 1
        if Forgetful.left < 0:
            raise ValueError("no face found")
        return Score(0.0)


class Letters(Constant):
    """Scores the share of an answer's characters that are lower-case letters, of one more than it has. A prompt that is
    `hard` gets no score."""

    accepts = ("text",)

    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        if any(prompt.metadata.get("hard") for prompt in prompts):
            raise ValueError("no such word")
        return [Score(sum(map(str.islower, one.text)) / (1 + len(one.text))) for one in media]


class NotANumber(Constant):
    value = float("nan")


class AlwaysRaises(Constant):
    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        raise OSError("the judge is out for lunch")


class Unbuildable(Constant):
    def __init__(self) -> None:
        sys.exit("no licence")


class Redness:
    """A scorer of videos with sound: how red they are, less how loud."""

    name = "redness"
    accepts = ("video",)

    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        return [Score(float(one.frames[..., 0].mean()) - float(one.waveform.max())) for one in media]
