"""Implements an OCR reward for images with text anywhere in them: RapidOCR's detector and recogniser together, both
inside its wheel.

The rule is the one of flow_grpo's and VeRL-Omni's OCR rewards. Of everything that was read, lines joined and without
white space or case, and the wanted text, n characters long:

    value = 1 if the wanted text occurs in it, else 1 - min(Levenshtein distance, n) / n

The built-in scorer `ocr` reads one line that fills the image, which is faster, and wrong for a photograph of a shop
sign.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from rapidfuzz.distance import Levenshtein

from omni_async.rewards.base import ScoreError, describe
from omni_async.rewards.ocr import missing_text, wanted_text
from omni_async.types import Prompt, Score


class SceneTextScorer:
    """A scorer that finds text anywhere in an image. Parts: `exact` (0 or 1, the wanted text was found) and `lines`,
    how many were read. The wanted text is the prompt's target, else the first text it has in double quotes."""

    name = "scene_text"

    def __init__(self, *, threads: Annotated[int, Meta(ge=1)] = 1) -> None:
        from rapidocr import RapidOCR

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
        return missing_text(prompt)

    def score(self, images: list[np.ndarray], prompts: list[Prompt]) -> list[Score]:
        wanted = [self._wanted(position, prompt) for position, prompt in enumerate(prompts)]
        return [self._judge(image, text) for image, text in zip(images, wanted, strict=True)]

    def _wanted(self, position: int, prompt: Prompt) -> str:
        text = wanted_text(prompt)
        if text is None:
            raise ScoreError(
                f'scorer {self.name!r}, {describe(position, prompt)}: no `target` and no text in "double quotes"'
            )
        return text.lower()

    def _judge(self, image: np.ndarray, wanted: str) -> Score:
        lines = self._read(np.ascontiguousarray(image[:, :, ::-1])).txts or ()  # RapidOCR takes BGR
        found = "".join("".join(lines).split()).lower()
        distance = 0 if wanted in found else min(Levenshtein.distance(found, wanted), len(wanted))
        value = 1 - distance / len(wanted)
        return Score(
            value=value, parts={"exact": float(distance == 0), "lines": float(len(lines))}, text=" ".join(lines)
        )
