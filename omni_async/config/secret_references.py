"""Replaces references to secrets by the secrets, where a part is built that needs them.

Recipes name the environment's variables, and run folders hold masks.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from omni_async.config.redact import MASK, REFERENCE


def resolve_references(value: Any, where: str) -> Any:
    """Return `value`, of plain values, with every `env:NAME` replaced by the environment's value.

    ValueError, one line that begins with `where`, for a variable that is not set, and for a mask."""
    if isinstance(value, dict):
        return {key: resolve_references(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [resolve_references(item, where) for item in value]
    if value == MASK:
        raise ValueError(
            f"{where}: a masked credential, as in a run folder's config.yaml; give it again, or name it as env:NAME"
        )
    if not isinstance(value, str) or not value.startswith(REFERENCE):
        return value
    variable = value.removeprefix(REFERENCE)
    found = os.environ.get(variable)
    if not found:
        raise ValueError(f"{where}: {value!r} names an environment variable that is not set; set {variable}")
    return found


def with_secrets(section: Any, where: str) -> Any:
    """Return a section of settings with its references replaced; anything else as it is.

    ValueError as `resolve_references`."""
    if not isinstance(section, msgspec.Struct):
        return section
    return msgspec.convert(resolve_references(msgspec.to_builtins(section), where), type(section))
