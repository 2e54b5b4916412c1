"""Scores the text that an image shows anywhere: RapidOCR's detector and recogniser together, both inside its wheel.

The rule is the same as in flow_grpo's and VeRL-Omni's OCR rewards. It compares the text read, lines joined and without
white space or case, with the wanted text, n characters long:

    value = 1 if the wanted text occurs in it, else 1 - min(Levenshtein distance, n) / n

For a video `frames` frames are read, as by the scorer `ocr`. The scorer `ocr` reads one line that fills the image: it
is faster, and wrong for a photograph of a shop sign.
"""

from __future__ import annotations

import logging
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from msgspec import Meta

from omni_async.media import evenly
from omni_async.rewards.base import ScoreError, Scorer, describe
from omni_async.rewards.scorers.ocr import mean_of_frames, missing_text, similarity_of, wanted_text
from omni_async.types import Prompt, Score

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from omni_async.media import Media


class SceneTextScorer(Scorer):
    """A scorer that finds text anywhere in an image.

    Parts: `exact` (0 or 1, the wanted text was found) and `lines`, the number of lines read. The wanted text is the
    prompt's target, else the first text it has in double quotes. `frames`: the number of frames to read of a video."""

    name = "scene_text"
    accepts = ("image", "video")
    deterministic = True

    def __init__(self, *, threads: Annotated[int, Meta(ge=1)] = 1, frames: Annotated[int, Meta(ge=1)] = 4) -> None:
        from rapidocr import RapidOCR

        self.version = f"rapidocr {metadata.version('rapidocr')}"
        self._frames = frames
        self._read: Any = RapidOCR(
            params={
                "Global.use_cls": False,
                "Global.log_level": "error",
                "EngineConfig.onnxruntime.intra_op_num_threads": threads,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            }
        )
        logging.getLogger("RapidOCR").setLevel(logging.ERROR)

    @staticmethod
    def check_prompt(prompt: Prompt, params: dict[str, Any]) -> str | None:
        """Require a text to read."""
        return missing_text(prompt)

    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        wanted = [_wanted(position, prompt) for position, prompt in enumerate(prompts)]
        return [self._score(one, text) for one, text in zip(media, wanted, strict=True)]

    def _score(self, media: Media, wanted: str) -> Score:
        if media.image is not None:
            return self._judge(media.pixels, wanted)
        return mean_of_frames([self._judge(frame, wanted) for frame in evenly(media.frames, self._frames)])

    def _judge(self, image: NDArray[np.uint8], wanted: str) -> Score:
        lines = self._read(np.ascontiguousarray(image[:, :, ::-1])).txts or ()  # RapidOCR takes BGR
        found = "".join("".join(lines).split()).lower()
        value = similarity_of(found, wanted)
        parts = {"exact": float(wanted in found), "lines": float(len(lines))}
        return Score(value=value, parts=parts, text=" ".join(lines))


def _wanted(position: int, prompt: Prompt) -> str:
    text = wanted_text(prompt)
    if text is None:
        raise ScoreError(f'{describe(position, prompt)}: no `target` and no text in "double quotes"')
    return text.lower()
