"""Decodes plain data to sections, and explains what a section refuses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from omni_async.config.describe import annotation_at, describe, fields_of, names_in, reason, struct_of
from omni_async.config.redact import shown
from omni_async.config.yaml_text import ConfigError
from omni_async.entry_points import did_you_mean

T = TypeVar("T", bound=msgspec.Struct)

_MOVED = {
    f"rollout.{key}": f"rollout.sampling.{key}" for key in ("height", "width", "true_cfg_scale", "negative_prompt")
}


def decode(tree: Any, section: type[T], *prefix: str) -> T:
    """Return `tree` as the section whose key is `prefix`; ConfigError names a wrong value's key and what it allows."""
    try:
        return msgspec.convert(tree, section)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(error, tree, section, prefix)) from None


def _explain(error: msgspec.ValidationError, tree: Any, root: type[msgspec.Struct], prefix: Sequence[str]) -> str:
    """Turn msgspec's message into `path: expected ..., got ...`."""
    text, _, location = str(error).partition(" - at `$")
    path = re.findall(r"[^.\[\]`]+", location)
    where = ".".join([*prefix, *path])
    if isinstance(error.__cause__, ValueError):  # of a section's own check
        return f"{where}: {error.__cause__}"
    if unknown := re.match(r"Object contains unknown field `(.*)`", text):
        key = ".".join([*prefix, *path, unknown[1]])
        if key in _MOVED:
            return f"{key}: is called {_MOVED[key]} now"
        section = struct_of(annotation_at(root, path)) if path else root
        allowed = sorted(fields_of(section)) if section else []
        return f"{key}: unknown key{did_you_mean(unknown[1], allowed) or ';'} allowed: {', '.join(allowed)}"
    if missing := re.match(r"Object missing required field `(.*)`", text):
        absent = [*path, missing[1]]
        return f"{'.'.join([*prefix, *absent])}: required, expected {describe(annotation_at(root, absent))}"
    annotation, found = annotation_at(root, path), tree
    for key in path:
        found = found[int(key)] if isinstance(found, list) else found[key]
    expected = describe(annotation, found) if annotation is not None else text.lower()
    why = reason(annotation, found)
    hint = did_you_mean(found, names_in(annotation)) if isinstance(found, str) else ""
    return f"{where or 'the file'}: expected {expected}{f' ({why})' if why else ''}, got {shown(found)}{hint}"
