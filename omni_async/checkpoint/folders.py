"""Lists a run's checkpoints, checks whether they are whole, and removes those that may go."""

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
    """Return the path where a checkpoint is written until it is whole."""
    return folder.with_name(f".{folder.name}.partial")


def _aside(folder: Path) -> Path:
    """Return the path where a checkpoint is kept while another of its version replaces it."""
    return folder.with_name(f".{folder.name}.old")


def newest_first(checkpoints: Path) -> Iterator[Path]:
    """Yield the checkpoints' paths.

    The final one, or the one aside if the process was killed before another of the same version was at the final path.
    """
    found = _by_version(checkpoints)
    yield from (found[version] for version in sorted(found, reverse=True))


def newest_version(checkpoints: Path) -> int:
    """Return the version of the newest checkpoint, by its name; 0 if there is none."""
    return max(_by_version(checkpoints), default=0)


def _by_version(checkpoints: Path) -> dict[int, Path]:
    final = {
        int(match[1]): path
        for path in checkpoints.glob("update-*")
        if (match := _NAME.fullmatch(path.name)) and path.is_dir()
    }
    aside = {
        int(match[1]): path
        for path in checkpoints.glob(".update-*")
        if (match := _ASIDE.fullmatch(path.name)) and path.is_dir()
    }
    return aside | final


def require_whole(folder: Path) -> None:
    """Raise CheckpointError, one line, unless every file is there as it was written and the state can be read."""
    check_manifest(folder)
    state = read_state(folder)
    check_tensors(folder)
    check_groups(folder, state)


def rotate(checkpoints: Path, keep: int, written: Path) -> None:
    """Keep only `written`, which was just renamed to its final path, and the newest before it, `keep` in all.

    Removes the others and what was never finished.

    Later ones than `written` go too. The run was resumed before them, because they are damaged or could not be used:
    their updates no longer exist, nor do the lines of the ledger that their states count. Left there, they would come
    first when the run is resumed again, and count among the `keep` in place of whole ones."""
    found = [*newest_first(checkpoints)]
    kept = found[found.index(written) :][:keep]
    for folder in (*found, *checkpoints.glob(".update-*")):
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def finish(folder: Path) -> None:
    """Rename what was written at `partial(folder)` to its final path; it is on disk when this returns.

    One that is already there, of the same version, is replaced: it is damaged, or the run was resumed from it, stopped
    before its next update, and has finished groups since. Until the new one is at the final path it is kept aside."""
    if folder.exists():
        shutil.rmtree(_aside(folder), ignore_errors=True)
        folder.rename(_aside(folder))
    partial(folder).rename(folder)
    sync(folder.parent)
    shutil.rmtree(_aside(folder), ignore_errors=True)
