"""Finds the model family that takes a checkpoint, by the class that its model_index.json names."""

from __future__ import annotations

import json
from pathlib import Path

from omni_async.config.reading import TooLargeError, read_file
from omni_async.families import family_names, find_family

_LARGEST_INDEX = 10_000_000


def family_of(folder: Path) -> str:
    """Return the name of the one installed family that takes the checkpoint in `folder`.

    ValueError, one line naming the key, if there is none, or several."""
    index = folder / "model_index.json"
    if not index.is_file():
        raise ValueError(f"model.path: {folder} is not a checkpoint folder in diffusers layout: it has no {index.name}")
    try:
        listed = json.loads(read_file(index, _LARGEST_INDEX).decode("utf-8"))
        found = listed["_class_name"]
    except (TooLargeError, OSError) as error:
        raise ValueError(f"model.path: {index} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError, LookupError, TypeError):
        raise ValueError(f"model.path: {index} names no pipeline class; copy it again") from None
    names = [name for name in family_names() if _takes(name, found)]
    if not names:
        raise ValueError(
            f"model.path: {folder} is a {found} checkpoint, and none of the installed families takes it, which are"
            f" {[*family_names()]}"
        )
    if len(names) > 1:
        raise ValueError(f"model.pipeline: {folder} is a {found} checkpoint, and {names} all take it: name one")
    return names[0]


def _takes(name: str, model_index_class: object) -> bool:
    try:
        return find_family(name).model_index_class == model_index_class
    except ValueError:  # a foreign package that is broken, which may have nothing to do with this checkpoint
        return False
