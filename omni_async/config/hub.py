"""Finds checkpoints that were downloaded from a model hub. Nothing is downloaded here: runs start without a network."""

from __future__ import annotations

import re
from pathlib import Path

_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def downloaded(given: str) -> Path | None:
    """Return the folder of the hub's cache on this machine with the checkpoint `given`, `owner/name`; None if none."""
    if not _ID.fullmatch(given):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(given, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def no_checkpoint(folder: Path) -> str:
    """Say that `folder` is no checkpoint, and what to do where it may be a hub's `owner/name`."""
    why = f"model.path: {folder} is not a checkpoint folder in diffusers layout: it has no model_index.json"
    if folder.exists():
        return why
    return f"model.path: {how_to_get(folder)}"


def how_to_get(folder: Path) -> str:
    """Say that there is no such folder, and what to do where it may be a hub's `owner/name`."""
    name = "/".join(folder.parts[-2:])
    return (
        f"there is no folder {folder}; a checkpoint of a hub is found by its name in the hub's cache on this machine,"
        f" once `hf download {name}` has put it there"
    )
