"""Finds checkpoints that were downloaded from a model hub. Nothing is downloaded here: runs start without a network."""

from __future__ import annotations

import re
import shlex
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
    """Say that `folder` is no checkpoint, and how to get one where there is no folder."""
    why = f"model.path: {folder} is not a checkpoint folder in diffusers layout: it has no model_index.json"
    if folder.exists():
        return why
    return f"model.path: {how_to_get(folder)}"


def how_to_get(folder: Path) -> str:
    """Say that there is no such folder, and how a checkpoint of a hub gets there, or is found by its name.

    A relative `owner/name` is what somebody typed, and may be a hub's. What a recipe says is absolute by now, and names
    no owner: `models` in `../../models/Qwen-Image` is none."""
    if not folder.parent.exists() and _ID.fullmatch(str(folder)):
        return (
            f"there is no folder {folder}, nor a checkpoint of that name in the hub's cache on this machine, where"
            f" `hf download {folder}` puts one"
        )
    return (
        f"there is no folder {folder}; a checkpoint of a hub gets there by"
        f" `hf download OWNER/NAME --local-dir {shlex.quote(str(folder))}`, or is found as OWNER/NAME in the hub's"
        " cache on this machine after `hf download OWNER/NAME`"
    )
