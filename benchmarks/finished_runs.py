"""Finds the run folder of a cell that holds the complete run that its configuration asks for, if any does.

A run counts by its own record, `summary.json` and `config.yaml`; nothing else is written down, so nothing can disagree
with it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from omni_async.config import Config, ConfigError, load
from omni_async.config.redact import redact
from omni_async.tracking.summary import read_summary

_PATHS = (("model", "path"), ("data", "prompts"), ("data", "preferences"), ("validation", "prompts"))


def finished_run(folder: Path, config: Config) -> Path | None:
    """Returns the newest run folder in `folder` that was done with these settings, from the recipe's to the
    overrides'."""
    wanted = comparable(config)
    for run in sorted(folder.glob("*/"), reverse=True):
        if _is_done(run) and _recorded(run) == wanted:
            return run
    return None


def comparable(config: Config) -> dict[str, Any]:
    """Returns the configuration as plain data, without what may differ between two folders that hold the same
    experiment: run.dir, and where the recipe's files lie. Their paths relative to each other stay."""
    tree: dict[str, Any] = redact(msgspec.to_builtins(config))
    del tree["run"]["dir"]
    files = [(section, key) for section, key in _PATHS if tree[section] is not None and tree[section][key] is not None]
    folders = [os.path.dirname(tree[section][key]) for section, key in files]  # noqa: PTH120 (text in, text out)
    root = os.path.commonpath(folders)
    for section, key in files:
        tree[section][key] = os.path.relpath(tree[section][key], root)
    return tree


def _is_done(run: Path) -> bool:
    try:
        return read_summary(run / "summary.json").status == "done"
    except (OSError, msgspec.DecodeError):  # cut off, or written by another version of the schema
        return False


def _recorded(run: Path) -> dict[str, Any] | None:
    try:
        return comparable(load(run / "config.yaml"))
    except ConfigError:  # a schema that has changed since
        return None
