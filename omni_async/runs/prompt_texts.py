"""Finds the texts of prompts by their numbers, in the prompt file that a run's configuration names."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec

from omni_async.config.reading import open_file

_SUFFIXES = (".txt", ".jsonl")
_LONGEST = 2**20  # bytes of a line
_SHOWN = 2000  # characters of a prompt


class _Line(msgspec.Struct):
    prompt: str


def prompt_texts(path: object, numbers: Collection[int]) -> dict[int, str]:
    """Return the texts of the prompts that are found; none if the file is elsewhere, or is no prompt file.

    Args:
        path: `data.prompts` of the configuration, whatever it is.
        numbers: positions among the non-empty lines, from 0."""
    if not isinstance(path, str) or Path(path).suffix not in _SUFFIXES or not numbers:
        return {}
    found: dict[int, str] = {}
    last, number = max(numbers), 0
    try:
        with open_file(path) as file:
            while number <= last and (line := file.readline(_LONGEST)):
                if not line.strip():
                    continue
                if number in numbers:
                    found[number] = _text(line, Path(path).suffix)[:_SHOWN]
                number += 1
    except (OSError, ValueError, RecursionError):
        return found
    return found


def _text(line: bytes, suffix: str) -> str:
    if suffix == ".txt":
        return line.decode().strip()
    return msgspec.json.decode(line, type=_Line).prompt
