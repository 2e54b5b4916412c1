"""Reads text answers for scorers: the part that counts, and texts that differ in spelling only."""

from __future__ import annotations

import unicodedata
from abc import ABC, abstractmethod
from typing import Annotated

from msgspec import Meta

from omni_async.media import Media
from omni_async.rewards.base import ScoreError, Scorer, describe
from omni_async.types import Prompt, Score

Tag = Annotated[str, Meta(pattern=r"\A\w+\Z", max_length=100)]

# Invisible marks of the direction of text.
_DIRECTIONS = dict.fromkeys((0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)))
# Composing a run of combining marks takes quadratic time.
_LONGEST_COMPOSED = 10_000


class TextScorer(Scorer, ABC):
    """The base of scorers that score one text answer after the other."""

    accepts = ("text",)
    deterministic = True

    def score(self, media: list[Media], prompts: list[Prompt]) -> list[Score]:
        return [self._described(i, one, prompt) for i, (one, prompt) in enumerate(zip(media, prompts, strict=True))]

    def _described(self, position: int, media: Media, prompt: Prompt) -> Score:
        try:
            return self._score(media, prompt)
        except ScoreError as error:
            raise ScoreError(f"{describe(position, prompt)}: {error}") from None

    @abstractmethod
    def _score(self, media: Media, prompt: Prompt) -> Score:
        """Return the score of one answer; ScoreError if it has none."""


def text_of(media: Media) -> str:
    assert media.text is not None, "its scorers accept nothing else"
    return media.text


def target_of(prompt: Prompt) -> str:
    """Return the prompt's target; ScoreError without one."""
    if prompt.target is None:
        raise ScoreError("the prompt has no target")
    return prompt.target


def content_of(text: str, tag: str | None) -> str | None:
    """Return the content of the last `<tag>...</tag>` in a text, None without one; the text if `tag` is None."""
    if tag is None:
        return text
    end = text.rfind(f"</{tag}>")
    begin = text.rfind(f"<{tag}>", 0, max(end, 0))
    return None if begin < 0 else text[begin + len(tag) + 2 : end]


def plain(text: str, *, case_sensitive: bool = False, ignore_spaces: bool = False) -> str:
    """Return a text with each run of white space as one space, or as none, and without marks of direction.

    Equal characters get equal code points (Unicode's NFC), in texts of up to 10,000 characters."""
    found = ("" if ignore_spaces else " ").join(text.translate(_DIRECTIONS).split())
    found = found if case_sensitive else found.casefold()
    return found if len(found) > _LONGEST_COMPOSED else unicodedata.normalize("NFC", found)
