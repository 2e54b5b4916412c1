"""Writes the recipe of an export, without paths of the machine that trained it."""

from __future__ import annotations

import os.path
from pathlib import Path
from typing import Any

import msgspec

from omni_async.commands.export.how_to_load import base_name
from omni_async.config import Config
from omni_async.config.redact import redact
from omni_async.config.tree import named_paths
from omni_async.config.yaml_text import to_yaml

_HEAD = """\
# The recipe of this model. A path of the machine that trained it is its last name here, relative to this file, or
# owner/name of a hub.
"""
_LOCAL = ("sqlite:", "file:")  # trackers' addresses that are paths


def portable_recipe(config: Config) -> str:
    """Return the configuration as YAML, with every default and without credentials or absolute paths."""
    tree = redact(msgspec.to_builtins(config))
    tree["checkpoint"]["resume"] = None
    paths = {*named_paths(tree), tree["run"]["dir"]}
    return _HEAD + to_yaml(_portable(tree, paths))


def _portable(value: Any, paths: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: _portable(item, paths) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(item, paths) for item in value]
    if not isinstance(value, str):
        return value
    if value.startswith(_LOCAL):
        return None
    is_path = value.startswith("/") and (value in paths or os.path.lexists(value))
    return base_name(Path(value)) if is_path else value
