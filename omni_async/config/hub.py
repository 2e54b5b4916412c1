"""Finds checkpoints and data sets that were downloaded from a hub. Downloads nothing: runs start without a network."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

_TABLE = re.compile(r"\.(txt|jsonl?|csv|tsv|parquet|arrow)$", re.IGNORECASE)
_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def downloaded(given: str, kind: str = "model") -> Path | None:
    """Return the folder of `given` (`owner/name`) in this machine's hub cache; None if it is missing.

    `kind`: model or dataset. `owner/name/path` names a part of a dataset."""
    owner, _, rest = given.partition("/")
    name, _, below = rest.partition("/") if kind == "dataset" else (rest, "", "")
    is_file = kind == "dataset" and not below and _TABLE.search(name)  # `prompts/train.txt` has no owner
    if is_file or not _ID.fullmatch(f"{owner}/{name}") or ".." in below.split("/"):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(f"{owner}/{name}", repo_type=kind, local_files_only=True), below)
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def no_checkpoint(folder: Path) -> str:
    """Return the error for a `folder` without a checkpoint; for a missing folder, with a way to get a checkpoint."""
    why = (
        f"model.path: {folder} is not a checkpoint folder: it has no model_index.json (diffusers layout), and no"
        " config.json that names architectures (transformers layout)"
    )
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


def how_to_get_data(path: Path) -> str:
    """Return the error for a missing data set, with the way to download a hub's. Its absolute path has its name."""
    name = "/".join(path.parts[-2:])
    hint = f"; a data set of a hub is found after `hf download --repo-type dataset {shlex.quote(name)}`"
    return f"no such file: {path}{hint if _ID.fullmatch(name) and not path.suffix else ''}"
