"""Finds the table in a folder.

A folder is one of these, in this order:

- a dataset that Hugging Face `datasets` saved: `state.json` and its `.arrow` files
- a folder of media with `metadata.jsonl`, `metadata.csv` or `metadata.parquet`, whose column `file_name` names them
- a folder of media with a caption per file: `a.txt` or `a.json` next to `a.png`
- a folder of tables of one split, as a data set in the hub's cache; `FOLDER/SPLIT` names one of several splits
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from omni_async.config import ConfigError
from omni_async.config.hub import how_to_get_data
from omni_async.config.reading import OutsideError, is_within, read_file
from omni_async.data.image_files import one_line
from omni_async.data.media_files import part_of
from omni_async.data.rows import object_of
from omni_async.data.tables import LEADS_OUT, SUFFIXES, Names, Row, Table, file_table

METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_LARGEST_SIDECAR = 2**20  # bytes
_MOST_FILES = 100_000
_SHARD = re.compile(r"(?P<split>.+?)(-\d{5}-of-\d{5})?")
_EXPECTED = "expected a saved dataset, metadata.jsonl, media with captions (a.png, a.txt), or tables of one split"


class _State(msgspec.Struct):
    """The part of a saved dataset's `state.json` that is used."""

    data_files: list[dict[str, Any]] = msgspec.field(name="_data_files", default_factory=list)


def folder_table(folder: Path, name: str, key: str) -> Table:
    """Return the table of a folder, or of `FOLDER/SPLIT`.

    Args:
        folder: it may be missing.
        name: the beginning of errors.
        key: the configuration path that named it; empty: the user named it.

    Raises:
        ConfigError: there is none, or more than one."""
    split = None
    if not folder.exists():
        if not folder.parent.is_dir() or not (tables := _tables(folder.parent, name)) or folder.suffix:
            raise ConfigError(f"{key}: {how_to_get_data(folder)}" if key else how_to_get_data(folder))
        folder, split = folder.parent, folder.name
        if split not in tables:
            raise ConfigError(f"{name}: no such split: {split!r}; {folder} has {', '.join(tables)}")
    root = _root(folder)
    if split is None:
        if (folder / "state.json").is_file():
            return _joined([folder / file for file in _saved_files(folder, name)], name, key, root)
        if (folder / "dataset_dict.json").is_file():
            raise ConfigError(f"{name}: holds several splits; name one, as {_first_folder(folder)}")
        if (metadata := metadata_of(folder)) is not None:
            table = file_table(metadata, f"{name}/{metadata.name}", key, root, root)
            return table._replace(read=partial(_with_media, table))
        if media := [file for file in sorted_files(folder, name) if part_of(file) is not None]:
            return Table(name, "file", folder, root, partial(_captioned, media, name, root))
        tables = _tables(folder, name)
        if not tables:
            raise ConfigError(f"{name} cannot be read: it is a folder, not a file; {_EXPECTED}")
        if len(tables) > 1:
            raise ConfigError(f"{name}: holds {', '.join(tables)}; name one, as {folder / next(iter(tables))}")
        split = next(iter(tables))
    return _joined(tables[split], name, key, root)


def metadata_of(folder: Path) -> Path | None:
    """Return the table that describes a folder's media, if it has one."""
    return next((folder / name for name in METADATA if (folder / name).is_file()), None)


def sorted_files(folder: Path, name: str) -> list[Path]:
    """Return the files of a folder by name. Raises ConfigError, which begins with `name`."""
    try:
        return sorted(file for file in folder.iterdir() if file.is_file())
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror or one_line(error)}") from None


def caption_of(file: Path, within: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the `.json` or `.txt` file of the same name, and its fields; None if there is none. ConfigError names it.

    `within`: the folder that it must not leave, links included."""
    fields, text = file.with_suffix(".json"), file.with_suffix(".txt")
    if os.path.isfile(fields):  # noqa: PTH113 (pathlib raises where a name has too many bytes)
        return fields, object_of(_sidecar(fields, within), str(fields))
    if os.path.isfile(text):  # noqa: PTH113
        return text, {"prompt": " ".join(_sidecar(text, within).split())}
    return None


def _sidecar(file: Path, within: Path) -> str:
    try:
        return read_file(file, _LARGEST_SIDECAR, within).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{file}:{number}: not UTF-8 text: {error.reason}") from None
    except OutsideError:
        raise ConfigError(f"{file}: {LEADS_OUT}") from None
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from None


def with_media(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a row with `file_name` as the part of media that the file holds."""
    file = fields.get("file_name")
    if not isinstance(file, str) or (part := part_of(Path(file))) is None or part in fields:
        return fields
    return {part: file, **{name: cell for name, cell in fields.items() if name != "file_name"}}


def _with_media(table: Table, names: Names) -> Iterator[Row]:
    for where, number, fields in table.read(names):
        yield Row(where, number, lambda fields=fields: with_media(fields()))  # type: ignore[misc]


def _captioned(media: list[Path], name: str, root: Path, names: Names) -> Iterator[Row]:
    for number, file in enumerate(media):

        def fields(file: Path = file) -> dict[str, Any]:
            if (found := caption_of(file, root)) is None:
                raise ConfigError(f"{name}/{file.name}: there is no caption; write {file.with_suffix('.txt').name}")
            return {part_of(file) or "": file.name, **found[1]}

        yield Row(f"{name}/{file.name}", number, fields)


def _joined(files: list[Path], name: str, key: str, root: Path) -> Table:
    """Return the table of several files of one format."""
    tables = [file_table(file, f"{key}: {file}" if key else str(file), key, root, root) for file in files]

    def read(names: Names) -> Iterator[Row]:
        number = 0
        for table in tables:
            for where, _, fields in table.read(names):
                yield Row(where, number, fields)
                number += 1

    return Table(name, "row", tables[0].folder, root, read) if len(tables) > 1 else tables[0]


def _saved_files(folder: Path, name: str) -> list[str]:
    try:
        content = read_file(folder / "state.json", _LARGEST_SIDECAR, _root(folder))
        files = [one.get("filename") for one in msgspec.json.decode(content, type=_State).data_files]
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{name}/state.json: {getattr(error, 'strerror', None) or one_line(error)}") from None
    plain = [file for file in files if isinstance(file, str) and file == Path(file).name and file.endswith(".arrow")]
    if not plain or plain != files:
        raise ConfigError(f"{name}/state.json: expected names of .arrow files in _data_files; save the dataset again")
    return plain


def _first_folder(folder: Path) -> Path:
    return next((one for one in sorted(folder.iterdir()) if (one / "state.json").is_file()), folder / "train")


def _tables(folder: Path, name: str) -> dict[str, list[Path]]:
    """Return the tables in a folder, or in its folder `data`, by split; of each split the files of its first format."""
    for place in (folder, folder / "data"):
        files = sorted_files(place, name) if place.is_dir() else []
        found: dict[str, list[Path]] = {}
        for file in files[:_MOST_FILES]:
            shard = _SHARD.fullmatch(file.stem)
            if file.suffix.lower() in SUFFIXES and shard is not None and _is_table(file):
                found.setdefault(shard["split"], []).append(file)
        if found:
            return {split: [one for one in ones if one.suffix == ones[0].suffix] for split, ones in found.items()}
    return {}


def _is_table(file: Path) -> bool:
    """Return whether a file is no part of a data set's description."""
    return file.name not in ("dataset_infos.json", "dataset_info.json", "state.json", "requirements.txt", "README.txt")


def _root(folder: Path) -> Path:
    """Return the folder that the files of `folder` must not leave: a snapshot in the hub's cache links to its blobs."""
    for above in (folder, *folder.parents):
        if above.parent.name == "snapshots" and above.parent.parent.name.startswith("datasets--"):
            return above.parent.parent
    return folder


def require_inside(files: list[Path], folder: Path) -> None:
    """Raise ConfigError if one of the files leads out of the folder."""
    if outside := next((file for file in files if not is_within(file, folder)), None):
        raise ConfigError(f"{outside}: {LEADS_OUT}")
