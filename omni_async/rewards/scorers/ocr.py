"""Scores whether an image shows the text of its prompt (the OCR reward), for images that hold one line of text.

similarity = 1 - Levenshtein distance / length of the longer text, spaces left out (as flow_grpo does). It is 0 or 1 for
one character, so whole groups tie. `dense: true` adds the recogniser's probability of the *wanted* text, whatever it
read:

    value = (similarity + p) / 2,    p = P(wanted text | image) ^ (1 / its length)      (CTC, `text_probability`)

The value is in [0, 1]. It rises with the confidence of the right text from 1/2 to 1. It falls with the confidence of a
wrong text, because p is at most the probability that the wrong text leaves. A right reading never scores below 1/2; a
reading with nothing right in it never scores above.

For a video, `frames` evenly spaced frames are read, the first and the last included (a single frame is the middle one).
Value and parts are the mean over them, because a text should be there all the time. The text shown is the text of the
frame with the best value.

RapidOCR's recogniser runs alone, on one line of text per image; the model ships inside its wheel. The network takes
images 48 pixels high, padded on the right to at least 320 pixels by default. Its time is proportional to that width, so
small square images are padded to 64 only. Images are not batched: a batch of 4 to 8 takes a fifth less on a CPU, but a
score would then depend, in its last bits, on its neighbours.
"""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any, cast

import cv2
import numpy as np
from msgspec import Meta
from rapidfuzz.distance import Levenshtein

from omni_async.media import evenly
from omni_async.rewards.base import ScoreError, Scorer, describe
from omni_async.types import Prompt, Score

if TYPE_CHECKING:
    from omni_async.media import Media

HEIGHT = 48
_STRAIGHT, _CURLY = re.compile(r'"([^"]+)"'), re.compile(r"“([^”]+)”")


@dataclass(frozen=True)
class Reading:
    """A recognised text.

    `confidence`: mean probability of the characters read, 0 if nothing was read. `frames` (T, C): probabilities over
    the alphabet."""

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


def text_probability(frames: np.ndarray, text: Sequence[Sequence[int]], silent: Sequence[int]) -> float:
    """Return the per-character geometric mean of P(text | frames), in [0, 1]; 0 if the text does not fit in.

    Source: Graves et al. 2006, section 4.1, eqs. 5-8 (alpha recursion), over the text with a blank before, between and
    after.

    Args:
        frames: (T, C), probabilities over the alphabet, rows summing to 1.
        text: for each character, the alphabet entries that count as it (for example both cases).
        silent: entries that write nothing, the CTC blank among them.

    Raises:
        ValueError: the text is empty."""
    if not text:
        raise ValueError("the probability of an empty text is not defined")
    blank = frames[:, list(silent)].sum(axis=1, dtype=np.float64)
    columns = [blank]
    for character in text:
        columns += [frames[:, list(character)].sum(axis=1, dtype=np.float64), blank]
    emit = np.stack(columns, axis=1).clip(max=1.0)

    num_states = emit.shape[1]
    skip = np.zeros(num_states, dtype=bool)  # a character may follow another one without a blank if they differ
    for i in range(1, len(text)):
        skip[2 * i + 1] = list(text[i]) != list(text[i - 1])
    alpha = np.zeros(num_states)
    alpha[:2] = emit[0, :2]
    for row in emit[1:]:
        arrive = alpha.copy()
        arrive[1:] += alpha[:-1]
        arrive[2:] += np.where(skip[2:], alpha[:-2], 0.0)
        alpha = arrive * row
    total = float(alpha[-1] + alpha[-2])
    return min(1.0, total) ** (1.0 / len(text))


def wanted_text(prompt: Prompt) -> str | None:
    """Return the prompt's target, else the first text in double quotes, without white space; None without both."""
    if prompt.target is not None:
        text = prompt.target
    else:
        # Search for curly quotes only up to the last closing one: each unclosed quote would scan the rest of the text.
        end = prompt.text.rfind("”") + 1
        found = [one for one in (_STRAIGHT.search(prompt.text), _CURLY.search(prompt.text, 0, end)) if one]
        text = min(found, key=lambda one: one.start())[1] if found else ""
    return "".join(text.split()) or None


def missing_text(prompt: Prompt) -> str | None:
    """Return an error for a prompt without wanted text, else None: the `check_prompt` of scorers that read."""
    if wanted_text(prompt) is not None:
        return None
    return 'the prompt has no `target` and no text in "double quotes" to look for'


def similarity_of(found: str, wanted: str) -> float:
    """Return 1 - min(Levenshtein distance, n) / n to the `wanted` text of n characters; 1 if `found` contains it."""
    if wanted in found:
        return 1.0
    return 1 - min(Levenshtein.distance(found, wanted, score_cutoff=len(wanted)), len(wanted)) / len(wanted)


@cache
def _alphabet() -> frozenset[str]:
    return frozenset(Recogniser(threads=1, width=HEIGHT).alphabet[1:])


def mean_of_frames(found: Sequence[Score]) -> Score:
    """Return the mean of the scores of a video's frames, with the text of the best frame."""
    parts = {name: sum(score.parts[name] for score in found) / len(found) for name in found[0].parts}
    best = max(found, key=lambda score: score.value)
    return Score(sum(score.value for score in found) / len(found), parts, best.text)


class ReadingScorer(Scorer, ABC):
    """The base of scorers that read an image, or `frames` frames of a video, for the wanted text of its prompt."""

    accepts = ("image", "video")
    deterministic = True

    def __init__(self, frames: int) -> None:
        self.version = f"rapidocr {metadata.version('rapidocr')}"
        self._frames = frames

    @staticmethod
    def check_prompt(prompt: Prompt, params: dict[str, Any]) -> str | None:
        """Require a text to read."""
        return missing_text(prompt)

    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        wanted = [self._wanted(describe(position, prompt), prompt) for position, prompt in enumerate(prompts)]
        return [self._score(one, text) for one, text in zip(media, wanted, strict=True)]

    def _score(self, media: Media, wanted: str) -> Score:
        if media.image is not None:
            return self._judge(media.pixels, wanted)
        return mean_of_frames([self._judge(frame, wanted) for frame in evenly(media.frames, self._frames)])

    def _wanted(self, where: str, prompt: Prompt) -> str:
        """Return the wanted text, without white space. ScoreError, which begins with `where`, if there is none."""
        text = wanted_text(prompt)
        if text is None:
            raise ScoreError(f'{where}: no `target` and no text in "double quotes"')
        return text

    @abstractmethod
    def _judge(self, image: np.ndarray, wanted: str) -> Score:
        """Return the score of an image uint8 (height, width, 3)."""


class OcrScorer(ReadingScorer):
    """The OCR scorer.

    Parts: `ocr` (similarity), `ocr_exact` (0 or 1), `ocr_confidence` (of the text read, 0 if nothing) and, if dense,
    `ocr_target` (p).

    `width`: the least width in pixels of the padded line, 48 pixels high; 320 is the model's own, time is proportional
    to it. `frames`: the number of frames to read of a video."""

    name = "ocr"

    def __init__(
        self,
        *,
        dense: bool = False,
        case_sensitive: bool = False,
        threads: Annotated[int, Meta(ge=1)] = 1,
        width: Annotated[int, Meta(ge=48, le=2048)] = 64,
        frames: Annotated[int, Meta(ge=1)] = 4,
    ) -> None:
        super().__init__(frames)
        self._dense = dense
        self._case_sensitive = case_sensitive
        self._recogniser = Recogniser(threads=threads, width=width)
        self._entries: dict[str, list[int]] = defaultdict(list)
        self._silent = [0]
        for index, character in enumerate(self._recogniser.alphabet[1:], start=1):
            if character.isspace():
                self._silent.append(index)
            else:
                self._entries[self._fold(character)].append(index)

    @staticmethod
    def check_prompt(prompt: Prompt, params: dict[str, Any]) -> str | None:
        """Require a text to read, in characters that the recogniser knows."""
        text = wanted_text(prompt)
        if text is None or text.isascii():  # all of ASCII is known, and loading the alphabet takes a second
            return missing_text(prompt)
        known = _alphabet()
        folds = not params["case_sensitive"]
        unknown = {c for c in text if c not in known and not (folds and known & {c.lower(), c.upper()})}
        return f"the recogniser's alphabet lacks {''.join(sorted(unknown))!r}" if unknown else None

    def _fold(self, text: str) -> str:
        return text if self._case_sensitive else text.lower()

    def _wanted(self, where: str, prompt: Prompt) -> str:
        text = self._fold(super()._wanted(where, prompt))
        unknown = sorted(set(text) - self._entries.keys())
        if unknown:
            raise ScoreError(f"{where}: the recogniser's alphabet lacks {''.join(unknown)!r}")
        return text

    def _judge(self, image: np.ndarray, wanted: str) -> Score:
        reading = self._recogniser.read(image)
        read = self._fold("".join(reading.text.split()))
        similarity = Levenshtein.normalized_similarity(read, wanted)
        parts = {"ocr": similarity, "ocr_exact": float(read == wanted), "ocr_confidence": reading.confidence}
        if not self._dense:
            return Score(value=similarity, parts=parts, text=reading.text)
        probability = text_probability(reading.frames, [self._entries[character] for character in wanted], self._silent)
        return Score((similarity + probability) / 2, {**parts, "ocr_target": probability}, reading.text)
