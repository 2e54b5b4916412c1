"""Provides the smallest valid recipe, and the message of `load` about a changed one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from omni_async.config import Config, ConfigError, load

MINIMAL = """\
model: {pipeline: qwen_image, path: checkpoints/tiny}
data: {prompts: prompts.txt}
reward: {scorers: [{name: ocr}]}
"""


def load_text(text: str, *overrides: str) -> Config:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return load(path, overrides)


def complaint(text: str, *overrides: str) -> str:
    """Returns the message for a recipe of this text, which must be refused."""
    return _message(lambda: load_text(text, *overrides))


def complaint_about(path: Path, *overrides: str) -> str:
    """Returns the message for the recipe in this file, which must be refused."""
    return _message(lambda: load(path, overrides))


def _message(loads: Callable[[], Config]) -> str:
    """Returns what is said: one line, and short enough to read."""
    with pytest.raises(ConfigError) as caught:
        loads()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700, message
    return message


def with_key(said: str, override: str) -> str:
    """Returns `said` with the override's key for a `~` that it begins with."""
    return override.partition("=")[0].strip() + said[1:] if said.startswith("~") else said
