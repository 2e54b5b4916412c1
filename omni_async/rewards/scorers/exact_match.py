"""Scores whether a text answer equals the prompt's target, but for spaces and case."""

from __future__ import annotations

from typing import Any

from omni_async.media import Media
from omni_async.rewards.base import ScoreError
from omni_async.rewards.scorers.text_answers import Tag, TextScorer, content_of, plain, target_of, text_of
from omni_async.types import Prompt, Score

_EMPTY = "the prompt's target is empty"


class ExactMatchScorer(TextScorer):
    """A scorer with value 1 if the answer equals the target, else 0.

    `tag`: only the content of the last `<tag>...</tag>` is the answer; without one the value is 0. `ignore_spaces`:
    leave out all white space; otherwise each run of it counts as one space.

    Part, with `tag`: `answered`, whether the text has the tag."""

    name = "exact_match"
    needs = ("target",)

    def __init__(self, *, tag: Tag | None = None, case_sensitive: bool = False, ignore_spaces: bool = False) -> None:
        self._tag, self._case_sensitive, self._ignore_spaces = tag, case_sensitive, ignore_spaces

    @staticmethod
    def check_prompt(prompt: Prompt, params: dict[str, Any]) -> str | None:
        """Require a target with a character to compare."""
        return None if plain(target_of(prompt)) else _EMPTY

    def _score(self, media: Media, prompt: Prompt) -> Score:
        wanted, found = self._plain(target_of(prompt)), content_of(text_of(media), self._tag)
        if not wanted:
            raise ScoreError(_EMPTY)
        parts = {} if self._tag is None else {"answered": float(found is not None)}
        return Score(float(found is not None and self._plain(found) == wanted), parts, found)

    def _plain(self, text: str) -> str:
        return plain(text, case_sensitive=self._case_sensitive, ignore_spaces=self._ignore_spaces)
