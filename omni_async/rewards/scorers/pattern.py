"""Scores whether a text answer has a format, given as a regular expression.

RE2 matches it, in time linear in the answer's length. Python's `re` can take exponential time, without releasing the
interpreter lock, so that no time-out could end it. RE2 has neither back-references nor look-around.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyarrow.compute import match_substring_regex

from omni_async.config.redact import one_line
from omni_async.media import Media
from omni_async.rewards.base import Scorer
from omni_async.rewards.scorers.text_answers import text_of
from omni_async.types import Prompt, Score


class PatternScorer(Scorer):
    """A scorer with value 1 if the answer matches `pattern`, else 0.

    `whole`: the whole answer has to match; otherwise any part of it. The pattern has RE2's syntax: `(?s)` lets a dot
    match line ends, too."""

    name = "pattern"
    accepts = ("text",)
    deterministic = True
    version = f"pyarrow {pa.__version__}"

    def __init__(self, *, pattern: str, whole: bool = True) -> None:
        if (problem := _problem(pattern)) is not None:
            raise ValueError(problem)
        self._pattern = _whole(pattern) if whole else pattern

    @classmethod
    def check_params(cls, params: dict[str, Any]) -> str | None:
        """Require a pattern that RE2 compiles."""
        return _problem(params["pattern"])

    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        return [Score(float(found)) for found in _matches([text_of(one) for one in media], self._pattern)]


def _whole(pattern: str) -> str:
    return rf"\A(?:{pattern})\z"


def _problem(pattern: str) -> str | None:
    """Return why a pattern is unusable, alone or inside another, as one line; None if it is usable."""
    try:
        _matches([""], pattern)
        _matches([""], _whole(pattern))
    except (pa.ArrowInvalid, UnicodeEncodeError) as error:
        return f"pattern: {one_line(str(error), 200)}"
    return None


def _matches(texts: list[str], pattern: str) -> list[bool]:
    fit = [text.encode("utf-8", "replace").decode() for text in texts]  # a half of a surrogate pair is no UTF-8
    return match_substring_regex(pa.array(fit, pa.large_string()), pattern).to_pylist()
