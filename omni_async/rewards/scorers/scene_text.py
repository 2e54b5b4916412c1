"""Scores the text that an image shows anywhere: RapidOCR's detector and recogniser together, both inside its wheel.

The rule is the same as in flow_grpo's and VeRL-Omni's OCR rewards. It compares the text read, lines joined and without
white space or case, with the wanted text, n characters long:

    value = 1 if the wanted text occurs in it, else 1 - min(Levenshtein distance, n) / n

For a video `frames` frames are read, as by the scorer `ocr`. The scorer `ocr` reads one line that fills the image: it
is faster, and wrong for a photograph of a shop sign.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from msgspec import Meta

from omni_async.rewards.scorers.ocr import ReadingScorer, similarity_of
from omni_async.types import Prompt, Score

if TYPE_CHECKING:
    from numpy.typing import NDArray


class SceneTextScorer(ReadingScorer):
    """A scorer that finds text anywhere in an image.

    Parts: `exact` (0 or 1, the wanted text was found) and `lines`, the number of lines read. The wanted text is the
    prompt's target, else the first text it has in double quotes. `frames`: the number of frames to read of a video."""

    name = "scene_text"

    def __init__(self, *, threads: Annotated[int, Meta(ge=1)] = 1, frames: Annotated[int, Meta(ge=1)] = 4) -> None:
        from rapidocr import RapidOCR

        super().__init__(frames)
        self._read: Any = RapidOCR(
            params={
                "Global.use_cls": False,
                "Global.log_level": "error",
                "EngineConfig.onnxruntime.intra_op_num_threads": threads,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            }
        )
        logging.getLogger("RapidOCR").setLevel(logging.ERROR)

    def _wanted(self, where: str, prompt: Prompt) -> str:
        return super()._wanted(where, prompt).lower()

    def _judge(self, image: NDArray[np.uint8], wanted: str) -> Score:
        lines = self._read(np.ascontiguousarray(image[:, :, ::-1])).txts or ()  # RapidOCR takes BGR
        found = "".join("".join(lines).split()).lower()
        value = similarity_of(found, wanted)
        parts = {"exact": float(wanted in found), "lines": float(len(lines))}
        return Score(value=value, parts=parts, text=" ".join(lines))
