"""Scores the length of a text answer: DAPO's soft overlong punishment (arXiv:2503.14476, equation 13).

With n tokens, the end token included:

    value = 0                                   if n <= max_tokens - buffer
            (max_tokens - buffer - n) / buffer  if n <= max_tokens
            -1                                  otherwise
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from omni_async.media import Media
from omni_async.rewards.base import ScoreError
from omni_async.rewards.scorers.text_answers import TextScorer
from omni_async.types import Prompt, Score

_Tokens = Annotated[int, Meta(ge=1, le=2**31)]


class OverlongScorer(TextScorer):
    """A scorer with a value from -1 to 0 that falls over the last `buffer` tokens of an answer of `max_tokens`.

    Part: `tokens`."""

    name = "overlong"

    def __init__(self, *, max_tokens: _Tokens, buffer: _Tokens) -> None:
        if (problem := _problem(max_tokens, buffer)) is not None:
            raise ValueError(problem)
        self._free, self._buffer = max_tokens - buffer, buffer

    @classmethod
    def check_params(cls, params: dict[str, Any]) -> str | None:
        """Require a buffer that fits in."""
        return _problem(params["max_tokens"], params["buffer"])

    def _score(self, media: Media, prompt: Prompt) -> Score:
        if media.tokens is None:
            raise ScoreError("the number of the answer's tokens is unknown; engines know it, files do not")
        over = min(max(0, media.tokens - self._free), self._buffer)
        return Score(-over / self._buffer if over else 0.0, {"tokens": float(media.tokens)})


def _problem(max_tokens: int, buffer: int) -> str | None:
    return None if buffer <= max_tokens else f"buffer: expected at most max_tokens = {max_tokens}, got {buffer}"
