"""Provides a random Qwen-Image of one layer, and a recipe around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.qwen_image.tiny import build
from tests.e2e.runs import write_recipe


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build(tmp_path_factory.mktemp("e2e") / "tiny", layers=1))


@pytest.fixture
def recipe(tmp_path: Path, checkpoint: str) -> Path:
    return write_recipe(tmp_path, checkpoint)
