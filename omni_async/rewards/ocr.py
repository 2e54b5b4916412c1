"""Implements the OCR reward: does the image show the text the prompt asks for? For images that hold one line of text.

similarity = 1 - Levenshtein distance / length of the longer text, spaces left out (as flow_grpo does). It is 0 or 1 for
one character, so whole groups tie. `dense: true` adds the recogniser's probability of the *wanted* text, whatever it
read:

    value = (similarity + p) / 2,    p = P(wanted text | image) ^ (1 / its length)      (CTC, `omni_async.rewards.ctc`)

which lies in [0, 1], rises with the confidence of the right text from 1/2 to 1, and falls with the confidence of a
wrong one, because p is at most the probability that the wrong text leaves. A right reading never scores below 1/2; a
reading with nothing right in it never above.

Of a video `frames` frames are read, evenly spaced, the first and the last among them (the middle one, if one): value
and parts are the mean over them, because a text is to be there all the time; the text shown is that of the frame with
the best value.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta
from rapidfuzz.distance import Levenshtein

from omni_async.media import evenly
from omni_async.rewards.base import ScoreError
from omni_async.rewards.checks import describe
from omni_async.rewards.ctc import text_probability
from omni_async.rewards.recogniser import HEIGHT, Reading, Recogniser
from omni_async.types import Prompt, Score

if TYPE_CHECKING:
    from omni_async.media import Media

_QUOTED = re.compile(r'"([^"]+)"|“([^”]+)”')


def wanted_text(prompt: Prompt) -> str | None:
    """Return the prompt's target, else the first text in double quotes, without white space; None if there is none."""
    if prompt.target is not None:
        text = prompt.target
    else:
        match = _QUOTED.search(prompt.text)
        text = (match[1] or match[2]) if match else ""
    return "".join(text.split()) or None


def missing_text(prompt: Prompt) -> str | None:
    """Return what to write where there is no wanted text, None if there is one: `check_prompt` of scorers that read."""
    return (
        None
        if wanted_text(prompt) is not None
        else 'the prompt has no `target` and no text in "double quotes" to look for'
    )


@cache
def _alphabet() -> frozenset[str]:
    return frozenset(Recogniser(threads=1, width=HEIGHT).alphabet[1:])


class OcrScorer:
    """The OCR scorer.

    Parts: `ocr` (similarity), `ocr_exact` (0 or 1), `ocr_confidence` (of what was read, 0 if nothing) and, if dense,
    `ocr_target` (p).

    `width`: pixels the 48 pixels high line is padded to at least; 320 is the model's own, time is proportional to it.
    `frames`: those that are read of a video."""

    name = "ocr"
    accepts = ("image", "video")

    def __init__(
        self,
        *,
        dense: bool = False,
        case_sensitive: bool = False,
        threads: Annotated[int, Meta(ge=1)] = 1,
        width: Annotated[int, Meta(ge=48, le=2048)] = 64,
        frames: Annotated[int, Meta(ge=1)] = 4,
    ) -> None:
        self._frames = frames
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
        unknown = {
            c for c in text if c not in known and (params["case_sensitive"] or not known & {c.lower(), c.upper()})
        }
        return f"the recogniser's alphabet lacks {''.join(sorted(unknown))!r}" if unknown else None

    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        wanted = [self._wanted(position, prompt) for position, prompt in enumerate(prompts)]
        return [self._score(one, text) for one, text in zip(media, wanted, strict=True)]

    def _score(self, media: Media, wanted: str) -> Score:
        if media.image is not None:
            return self._judge(self._recogniser.read(media.pixels), wanted)
        found = [self._judge(self._recogniser.read(frame), wanted) for frame in evenly(media.frames, self._frames)]
        parts = {name: sum(score.parts[name] for score in found) / len(found) for name in found[0].parts}
        best = max(found, key=lambda score: score.value)
        return Score(sum(score.value for score in found) / len(found), parts, best.text)

    def _fold(self, text: str) -> str:
        return text if self._case_sensitive else text.lower()

    def _wanted(self, position: int, prompt: Prompt) -> str:
        text = wanted_text(prompt)
        if text is None:
            raise ScoreError(
                f'scorer {self.name!r}, {describe(position, prompt)}: no `target` and no text in "double quotes"'
            )
        text = self._fold(text)
        unknown = sorted(set(text) - self._entries.keys())
        if unknown:
            raise ScoreError(
                f"scorer {self.name!r}, {describe(position, prompt)}: the recogniser's alphabet lacks"
                f" {''.join(unknown)!r}"
            )
        return text

    def _judge(self, reading: Reading, wanted: str) -> Score:
        read = self._fold("".join(reading.text.split()))
        similarity = Levenshtein.normalized_similarity(read, wanted)
        parts = {"ocr": similarity, "ocr_exact": float(read == wanted), "ocr_confidence": reading.confidence}
        if not self._dense:
            return Score(value=similarity, parts=parts, text=reading.text)
        probability = text_probability(reading.frames, [self._entries[character] for character in wanted], self._silent)
        return Score(
            value=(similarity + probability) / 2, parts={**parts, "ocr_target": probability}, text=reading.text
        )
