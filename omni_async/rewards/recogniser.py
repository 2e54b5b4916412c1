"""Runs RapidOCR's text recogniser alone, on one line of text per image; the model ships inside its wheel.

The network takes images 48 pixels high, padded on the right to at least 320 pixels by default; its time is proportional
to that width, so small square images are padded to 64 only. Each image runs by itself: on a CPU a batch is no faster,
and a score would then depend, in its last bits, on its neighbours.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, cast

import cv2
import numpy as np

HEIGHT = 48


@dataclass(frozen=True)
class Reading:
    """The text that was read.

    `confidence`: mean probability of the characters read, 0 when nothing was. `frames` (T, C): probabilities over the
    alphabet."""

    text: str
    confidence: float
    frames: np.ndarray


class Recogniser:
    """A text recogniser. `alphabet[i]` is the text that column i of `frames` writes; column 0 is the CTC blank."""

    def __init__(self, threads: int, width: int) -> None:
        from rapidocr import RapidOCR

        engine = RapidOCR(
            params={
                "Global.use_det": False,
                "Global.use_cls": False,
                "Global.log_level": "error",
                "EngineConfig.onnxruntime.intra_op_num_threads": threads,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
                "Rec.rec_img_shape": [3, HEIGHT, width],
                "Rec.rec_batch_num": 1,
            }
        )
        logging.getLogger("RapidOCR").setLevel(logging.ERROR)
        engine(np.zeros((HEIGHT, width, 3), np.uint8), use_det=False, use_cls=False, use_rec=True)  # loads the model
        self._recognise = cast(Any, engine.text_rec)
        self._width = width
        self.alphabet: list[str] = list(self._recognise.postprocess_op.character)

    def read(self, image: np.ndarray) -> Reading:
        """Read the text of `image`, uint8 (height, width, 3), RGB."""
        height, width = image.shape[:2]
        line_width = max(1, round(width * HEIGHT / height))
        resample = cv2.INTER_AREA if height > HEIGHT else cv2.INTER_CUBIC
        resized = cv2.resize(image[:, :, ::-1], (line_width, HEIGHT), interpolation=resample)
        tensor = self._recognise.resize_norm_img(resized, max(self._width, line_width) / HEIGHT)
        frames = self._recognise.session(tensor[None].astype(np.float32))
        [(text, confidence)], _ = self._recognise.postprocess_op(frames)
        return Reading(text=text, confidence=float(np.clip(confidence, 0.0, 1.0)), frames=frames[0])
