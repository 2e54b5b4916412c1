"""Which checkpoints there are, which are whole, and which may go."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from omni_async.checkpoint.manifest import check_manifest, sync
from omni_async.checkpoint.state import read_state
from omni_async.checkpoint.trajectories import check_groups, check_tensors

_NAME = re.compile(r"update-(\d{6,})")
_ASIDE = re.compile(r"\.update-(\d{6,})\.old")


def folder_name(version: int) -> str:
    return f"update-{version:06d}"


def partial(folder: Path) -> Path:
    """Where a checkpoint is written until it is whole."""
    return folder.with_name(f".{folder.name}.partial")


def _aside(folder: Path) -> Path:
    """Where a checkpoint lies while another of its version takes its place."""
    return folder.with_name(f".{folder.name}.old")


def newest_first(checkpoints: Path) -> Iterator[Path]:
    """Where each of them lies: in its place, or still aside if the process was killed before another of its version was
    in that."""
    found = _by_version(checkpoints)
    yield from (found[version] for version in sorted(found, reverse=True))


def newest_version(checkpoints: Path) -> int:
    """The version of the newest, by its name; 0 if there is none."""
    return max(_by_version(checkpoints), default=0)


def _by_version(checkpoints: Path) -> dict[int, Path]:
    places = {
        int(match[1]): path
        for path in checkpoints.glob("update-*")
        if (match := _NAME.fullmatch(path.name)) and path.is_dir()
    }
    aside = {
        int(match[1]): path
        for path in checkpoints.glob(".update-*")
        if (match := _ASIDE.fullmatch(path.name)) and path.is_dir()
    }
    return aside | places


def require_whole(folder: Path) -> None:
    """CheckpointError, one line, unless every file is there as it was written and the state can be read."""
    check_manifest(folder)
    state = read_state(folder)
    check_tensors(folder)
    check_groups(folder, state)


def rotate(checkpoints: Path, keep: int, written: Path) -> None:
    """Only `written`, which was just put in its place, and the newest before it stay, `keep` in all; and nothing that
    was never finished.

    Later ones than `written` go too. The run was resumed before them, because they are damaged or could not be used:
    their updates no longer exist, nor do the lines of the ledger that their states count. Left there, they would come
    first when the run is resumed again, and take the places of whole ones.
    """
    found = [*newest_first(checkpoints)]
    kept = found[found.index(written) :][:keep]
    for folder in (*found, *checkpoints.glob(".update-*")):
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def finish(folder: Path) -> None:
    """Put what was written at `partial(folder)` in its place, for good when it returns.

    One that lies there already, of the same version, gives way: it is damaged, or the run was resumed from it, stopped
    before its next update, and has finished groups since. Until the new one is in its place it is kept aside.
    """
    if folder.exists():
        shutil.rmtree(_aside(folder), ignore_errors=True)
        folder.rename(_aside(folder))
    partial(folder).rename(folder)
    sync(folder.parent)
    shutil.rmtree(_aside(folder), ignore_errors=True)
