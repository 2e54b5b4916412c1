"""Finds checkpoints that were downloaded from a model hub. Downloads nothing: runs start without a network."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def downloaded(given: str) -> Path | None:
    """Return the folder of the checkpoint `given` (`owner/name`) in this machine's hub cache; None if it is missing."""
    if not _ID.fullmatch(given):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(given, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def no_checkpoint(folder: Path) -> str:
    """Return the error for a `folder` without a checkpoint; for a missing folder, with a way to get a checkpoint."""
    why = f"model.path: {folder} is not a checkpoint folder in diffusers layout: it has no model_index.json"
    if folder.exists():
        return why
    return f"model.path: {how_to_get(folder)}"


def how_to_get(folder: Path) -> str:
    """Return the error for a missing folder, with the ways to download a hub's checkpoint to it or to name it.

    A relative `owner/name` was typed by a user, and may be a hub's name. A recipe's path is absolute here, and its
    parts name no owner: `models` in `../../models/Qwen-Image` is no owner."""
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
