"""Scores whether a text answer chooses the right option of a question.

An answer names an option by its letter (`B`, `(b)`, `**B.**`), by its text, or by both (`B: two cats`); `The answer is`
may precede. Any other answer chooses nothing, such as a letter with the text of another option.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any

from omni_async.media import Media
from omni_async.rewards.base import ScoreError
from omni_async.rewards.scorers.text_answers import Tag, TextScorer, content_of, plain, target_of, text_of
from omni_async.types import Prompt, Score

_LEAD = re.compile(r"(?:the )?(?:correct |right |best |final )?(?:answer|option|choice)(?: is)?+(?:: ?| )")
_LETTER = re.compile(r"[ (\[*_`\"']*+([a-z])")
_SEPARATORS = frozenset(" )].:,*_`\"'")
_MOST = len(ascii_uppercase)
_SHOWN = 100


class ChoiceScorer(TextScorer):
    """A scorer with value 1 if the answer chooses the target, else 0.

    `options`: the key of the prompt's metadata with 2 to 26 texts or numbers; the first has the letter A. The target is
    the letter or the text of an option. `tag`: only the content of the last `<tag>...</tag>` is the answer.

    Part: `answered`, whether the answer chooses an option. Text: its letter."""

    name = "choice"
    needs = ("target",)

    def __init__(self, *, options: str = "options", tag: Tag | None = None) -> None:
        self._options, self._tag = options, tag

    @staticmethod
    def check_prompt(prompt: Prompt, params: dict[str, Any]) -> str | None:
        """Require options that differ, and a target among them."""
        try:
            _question(prompt, params["options"])
        except ScoreError as error:
            return str(error)
        return None

    def _score(self, media: Media, prompt: Prompt) -> Score:
        options, right = _question(prompt, self._options)
        text = content_of(text_of(media), self._tag)
        chosen = None if text is None else _chosen(text, options)
        letter = None if chosen is None else ascii_uppercase[chosen]
        return Score(float(chosen == right), {"answered": float(chosen is not None)}, letter)


def _question(prompt: Prompt, key: str) -> tuple[list[str], int]:
    """Return the plain texts of the options, and the position of the right one. ScoreError if they are unusable."""
    given = prompt.metadata.get(key)
    if not isinstance(given, list) or not all(_is_option(one) for one in given):
        raise ScoreError(f"metadata {key!r}: expected a list of texts or numbers, the options")
    if not 2 <= len(given) <= _MOST:
        raise ScoreError(f"metadata {key!r}: expected 2 to {_MOST} options, got {len(given)}")
    options = [_bare(str(one)) for one in given]
    if "" in options or len({*options}) < len(options):
        raise ScoreError(f"metadata {key!r}: options are empty or alike")
    letters = [*ascii_uppercase[: len(options)].casefold()]
    if mixed := [one for i, one in enumerate(options) if one in letters and one != letters[i]]:
        raise ScoreError(f"metadata {key!r}: the text of option {mixed[0]!r} is the letter of another")
    target = target_of(prompt)
    if (right := _chosen(target, options)) is None:
        raise ScoreError(f"the target {target[:_SHOWN]!r} is no letter or text of the {len(options)} options")
    return options, right


def _is_option(one: Any) -> bool:
    return isinstance(one, str | int | float) and not isinstance(one, bool)


def _bare(text: str) -> str:
    return plain(text).strip(" *_`\"'").rstrip(" .")


def _chosen(text: str, options: Sequence[str]) -> int | None:
    """Return the position of the option that a text names, None if it names none."""
    spoken = _bare(text)
    if spoken in options:
        return options.index(spoken)
    if lead := _LEAD.match(spoken):
        spoken = _bare(spoken[lead.end() :])
        if spoken in options:
            return options.index(spoken)
    named = _LETTER.match(spoken)
    letter = ascii_uppercase.casefold().index(named[1]) if named else len(options)
    if named is None or letter >= len(options):
        return None
    rest = spoken[named.end() :]
    between = rest.removesuffix(options[letter])
    return letter if _SEPARATORS.issuperset(between) and (between or not rest) else None
