"""Judges that recipes name, such as `tests.commands.scoring.judges:Red`; `calls` has the prompts of their samples."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np

from omni_async.media import Media
from omni_async.rewards.base import ScoreError
from omni_async.types import Prompt, Score
from tests.support.patience import PATIENCE

calls: list[Any] = []
impatient: list[int] = []  # `Brightness` presses Ctrl-C, in place of the user, when it has been asked so often
recorded, over = threading.Event(), threading.Event()  # for `Impatient`: it may press Ctrl-C, and the program has ended


class Red:
    """Scores the red of the first pixel, and fails where it is 13."""

    name = "red"
    accepts = ("image", "video", "audio")

    def __init__(self, *, scale: float = 1.0) -> None:
        self._scale = scale

    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        calls.extend(prompts)
        return [self._score(one, prompt) for one, prompt in zip(media, prompts, strict=True)]

    def _score(self, one: Media, prompt: Prompt) -> Score:
        red = self.red(one)
        if red == 13:
            raise ScoreError("thirteen is unlucky")
        return Score(self._scale * red, {"length": float(len(prompt.text))}, prompt.target)

    @staticmethod
    def red(one: Media) -> int:
        if one.audio is not None:
            return int(one.audio.shape[1])
        return int(one.image[0, 0, 0] if one.image is not None else one.video[0, 0, 0, 0])


class Moody(Red):
    """Adds 1 to every second score of a sample and subtracts 1 of the others: a variance of 4/3 over four."""

    def __init__(self) -> None:
        super().__init__()
        self._asked: dict[int, int] = {}

    def _score(self, one: Media, prompt: Prompt) -> Score:
        red = self.red(one)
        self._asked[red] = self._asked.get(red, 0) + 1
        return Score(red + (-1.0) ** self._asked[red])


class Steady(Red):
    """Scores everything with 100."""

    def _score(self, one: Media, prompt: Prompt) -> Score:
        return Score(100.0)


class Impatient(Red):
    """Presses Ctrl-C at the sample of red 60, in place of the user."""

    def _score(self, one: Media, prompt: Prompt) -> Score:
        if self.red(one) == 60:
            assert recorded.wait(PATIENCE), "the samples before it are on record"
            os.kill(os.getpid(), signal.SIGINT)
            over.wait(PATIENCE)  # no answer: it might be on record before the interrupt
        return super()._score(one, prompt)


class Exact(Red):
    deterministic = True


class Lower(Exact):
    def _score(self, one: Media, prompt: Prompt) -> Score:
        return Score(-super()._score(one, prompt).value)


class Demanding(Red):
    @staticmethod
    def check_prompt(prompt: Prompt, params: dict[str, Any]) -> str | None:
        return None if prompt.target else "the prompt has no target"


class Brightness:
    """Scores the mean of all pixels, and cannot score the prompt `unlucky`."""

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
