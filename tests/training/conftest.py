"""Leaves no process group behind, and installs packages that bring entry points."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Returns a function that installs a package with these entry points, and returns the folder that it is in."""

    def package(entry_points: str) -> Path:
        info = tmp_path / "outside-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entry_points)
        monkeypatch.syspath_prepend(tmp_path)
        return tmp_path

    return package
