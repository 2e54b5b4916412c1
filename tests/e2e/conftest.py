"""A random Qwen-Image of one layer, and a recipe around it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pipelines.qwen_image.tiny import build
from tests.e2e.runs import write_recipe


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build(tmp_path_factory.mktemp("e2e") / "tiny", layers=1))


@pytest.fixture
def recipe(tmp_path: Path, checkpoint: str) -> Path:
    return write_recipe(tmp_path, checkpoint)
