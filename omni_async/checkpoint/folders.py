"""Which checkpoints there are, which are whole, and which may go."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from omni_async.checkpoint.errors import CheckpointError
from omni_async.checkpoint.manifest import check_manifest
from omni_async.checkpoint.state import read_state
from omni_async.checkpoint.trajectories import check_groups, check_tensors

_NAME = re.compile(r"update-(\d{6,})")


def folder_name(version: int) -> str:
    return f"update-{version:06d}"


def partial(folder: Path) -> Path:
    """Where a checkpoint is written until it is whole."""
    return folder.with_name(f".{folder.name}.partial")


def newest_first(checkpoints: Path) -> Iterator[Path]:
    found = [(int(match[1]), path) for path in checkpoints.glob("update-*") if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    yield from (path for _, path in sorted(found, reverse=True))


def require_whole(folder: Path) -> None:
    """CheckpointError, one line, unless every file is there as it was written and the state can be read."""
    check_manifest(folder)
    state = read_state(folder)
    check_tensors(folder)
    check_groups(folder, state)


def newest_whole(checkpoints: Path, refused: Callable[[str], None]) -> Path | None:
    """The newest one that is whole; `refused` is told why of each that is not."""
    for folder in newest_first(checkpoints):
        try:
            require_whole(folder)
        except CheckpointError as error:
            refused(str(error))
        else:
            return folder
    return None


def rotate(checkpoints: Path, keep: int) -> None:
    """Only the newest `keep` stay, and nothing that was never finished."""
    for folder in [*newest_first(checkpoints)][keep:]:
        shutil.rmtree(folder, ignore_errors=True)
    for leftover in checkpoints.glob(".update-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def finish(folder: Path) -> None:
    """Put what was written at `partial(folder)` in its place. One that lies there already, of the same version, gives way."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial(folder).rename(folder)
    shutil.rmtree(old, ignore_errors=True)
