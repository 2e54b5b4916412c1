"""Compares the name of the answering model with the requested one, which may have several names."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from omni_async.config.decoding import decode_json
from omni_async.rewards.base import ScoreError

# Suffixes that providers append: gpt-4o-2024-08-06, claude-sonnet-4-20250514, gpt-4-0613, gemini-1.5-pro-002.
_VERSION = r"-(\d{4}-\d{2}-\d{2}|\d{8}|\d{3,4})"
_NEWEST = "-latest"


_MOST_VALUES = 100_000  # of a list of models
MOST_NAMES = 1000
_Name = Annotated[str, Meta(max_length=1000)]


class _Card(msgspec.Struct):
    id: _Name
    root: _Name | None = None
    parent: _Name | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


def is_version_of(answered: str, asked: str) -> bool:
    """Return whether `answered` is `asked` with a date or a number of three or four digits."""
    return re.fullmatch(re.escape(asked.removesuffix(_NEWEST)) + _VERSION, answered) is not None


def served_names(content: bytes) -> list[str]:
    """Return the models in the body of a server's `/v1/models`. ScoreError if the body is not a list of models."""
    try:
        cards: _Cards = decode_json(content, _Cards, most=_MOST_VALUES)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ScoreError(f"its list of models cannot be read: {error}") from None
    return [card.id for card in cards.data]


def listed_names(content: bytes, model: str) -> set[str]:
    """Return the other names of `model` according to the body of a server's `/v1/models`.

    Empty if the body is not a list of models, or if there are more than 1000 names.

    They are the models with the same `root` (vLLM answers with the first name that it serves a model by), the root
    itself, and the `parent`, the base model of a LoRA."""
    try:
        cards: list[_Card] = decode_json(content, _Cards, most=_MOST_VALUES).data
    except (msgspec.MsgspecError, ValueError):
        return set()
    own = [card for card in cards if card.id == model]
    roots = {card.root for card in own if card.root}
    names = {card.id for card in cards if card.root in roots} | roots | {card.parent for card in own if card.parent}
    return names if len(names) <= MOST_NAMES else set()
