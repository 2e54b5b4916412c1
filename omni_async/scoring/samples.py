"""Finds what `omni-async score` is to score: media files and the prompt of each.

A path is a media file, a folder of them, a table, or the folder of a run, whose tables lie in `samples/`. The prompt of
a file is in a file of the same name with the suffix `.txt` (a prompt) or `.json` (an object as in a prompt file), or in
the folder's `prompts.txt` or `prompts.jsonl`, a line per file in the order of their names. A table, `.jsonl`, `.csv` or
`.parquet`, has a row per sample with `prompt`, its media as `image`, `video` and `audio` (paths relative to the table),
perhaps `target`, `images` (those that the prompt carries) and `metadata`; other columns are metadata, too.

Opens no media. What cannot be a sample is a ConfigError of one line, before anything is scored.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from omni_async.config import ConfigError, redact
from omni_async.config.reading import TooLargeError, read_file
from omni_async.data.image_files import one_line, prompt_image
from omni_async.data.media_files import SUFFIXES, part_of
from omni_async.data.prompts import decode, load_prompts, parse_object
from omni_async.families import PARTS
from omni_async.types import Prompt

_TABLES = (".jsonl", ".csv", ".parquet")
_PROMPT_FILES = ("prompts.txt", "prompts.jsonl")
_GRID = re.compile(r"(train|validation)-\d{6}")  # of a run; its tiles have a number more
_LARGEST_TABLE = 2**30
_LARGEST_SIDECAR = 2**20


class Sample(Struct, frozen=True):
    """A sample to score: its files by part of media, and its prompt.

    `name` is how results call it: characters that no terminal should get, or no file can hold, are escaped."""

    name: str
    files: dict[str, Path]
    prompt: Prompt


def find_samples(paths: list[Path], max_chars: int) -> list[Sample]:
    """Return all samples, numbered through, in the order of the paths and of names in a folder.

    `max_chars`: how many characters a prompt of a prompt file may have. Raises ConfigError."""
    found = [sample for path in paths for sample in _samples_of(path, max_chars)]
    return [replace(sample, prompt=replace(sample.prompt, index=i)) for i, sample in enumerate(found)]


def files_read(paths: list[Path], samples: list[Sample]) -> list[Path]:
    """Return the files that `find_samples` and scoring read for these paths."""
    media = [file for sample in samples for file in sample.files.values()]
    images = [Path(image.path) for sample in samples for image in sample.prompt.images if image.path]
    beside = (file.with_suffix(suffix) for file in media for suffix in (".txt", ".json"))
    sidecars = [file for file in beside if file.is_file()]
    folders = {folder for path in paths if path.is_dir() for folder in (path, path / "samples")}
    lists = [file for folder in folders for file in (*folder.glob("prompts.txt"), *folder.glob("*.jsonl"))]
    return [*(path for path in paths if not path.is_dir()), *media, *images, *sidecars, *lists]


def _samples_of(path: Path, max_chars: int) -> list[Sample]:
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or one_line(error)}") from None
    if not exists:
        raise ConfigError(f"{path}: no such file or folder")
    if is_folder:
        return _of_folder(path, max_chars)
    if (part := part_of(path)) is not None:
        return [Sample(redact.one_line(str(path)), {part: path}, _sidecar(path) or Prompt(0, ""))]
    if path.suffix.lower() in _TABLES:
        return _of_table(path)
    known = ", ".join([*SUFFIXES, *_TABLES])
    raise ConfigError(f"{path}: expected a folder or a file with one of the suffixes {known}")


# ---- folders ---------------------------------------------------------------------------------------------------------


def _of_folder(folder: Path, max_chars: int) -> list[Sample]:
    if (folder / "samples").is_dir() and (folder / "config.yaml").is_file():  # of a run
        folder = folder / "samples"
    tables = [file for file in _sorted(folder) if _is_of_run(file)]
    if tables:
        return [sample for table in tables for sample in _of_table(table)]
    files = [file for file in _sorted(folder) if part_of(file) is not None]
    if not files:
        raise ConfigError(f"{folder}: holds no media; expected files with one of the suffixes {', '.join(SUFFIXES)}")
    listed = [folder / name for name in _PROMPT_FILES if (folder / name).is_file()]
    prompts = [_sidecar(file) for file in files]
    if listed:
        lines = load_prompts(str(listed[0]), "prompts", max_chars)
        if len(lines) != len(files):
            raise ConfigError(f"{listed[0]}: {len(lines)} prompts for {len(files)} files; expected a line per file")
        prompts = [own or line for own, line in zip(prompts, lines, strict=True)]
    return [
        Sample(redact.one_line(str(file)), {part_of(file) or "": file}, prompt or Prompt(0, ""))
        for file, prompt in zip(files, prompts, strict=True)
    ]


def _sorted(folder: Path) -> list[Path]:
    try:
        return sorted(file for file in folder.iterdir() if file.is_file())
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror or error}") from None


def _sidecar(file: Path) -> Prompt | None:
    """Return the prompt in the text or JSON file beside a media file, if there is one."""
    text, fields = file.with_suffix(".txt"), file.with_suffix(".json")
    if fields.is_file():
        return _with_images(parse_object(0, _text(fields, _LARGEST_SIDECAR), str(fields)), fields)
    if text.is_file():
        return Prompt(0, " ".join(_text(text, _LARGEST_SIDECAR).split()))
    return None


# ---- tables ----------------------------------------------------------------------------------------------------------


def _is_of_run(file: Path) -> bool:
    """Return whether the file is a table that a run wrote beside its samples."""
    return file.suffix == ".jsonl" and _GRID.fullmatch(file.stem) is not None


def _of_table(table: Path) -> list[Sample]:
    rows = list(_rows(table))
    if _is_of_run(table):
        for _, row in rows:
            row.pop("reward", None)  # what the run made of the sample; its prompt's metadata are in a key of their own
    samples = [_of_row(table, where, row) for where, row in rows]
    if not samples:
        raise ConfigError(f"{table}: holds no rows")
    return samples


def _rows(table: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a table, each with where it is; cells that are empty are left out."""
    match table.suffix.lower():
        case ".jsonl":
            for number, line in enumerate(_text(table, _LARGEST_TABLE).split("\n"), start=1):
                where = f"{table}:{number}"
                if line.strip():
                    row = decode(line, where)
                    if not isinstance(row, dict):
                        raise ConfigError(f"{where}: expected an object")
                    yield where, {key: cell for key, cell in row.items() if cell is not None}
        case ".csv":
            rows = csv.DictReader(io.StringIO(_text(table, _LARGEST_TABLE), newline=""))
            try:
                for row in rows:
                    where = f"{table}:{rows.line_num}"
                    if None in row:
                        raise ConfigError(f"{where}: more cells than the first line has columns")
                    yield where, {key: _json_cell(key, cell, where) for key, cell in row.items() if cell}
            except csv.Error as error:
                raise ConfigError(f"{table}:{rows.line_num}: no CSV: {error}") from None
        case _:
            for number, row in enumerate(_parquet(table)):
                yield f"{table}: row {number}", {key: cell for key, cell in row.items() if cell is not None}


def _json_cell(key: str, cell: str, where: str) -> Any:
    """Return a cell of a CSV: those of lists and objects are JSON."""
    return decode(cell, f"{where}: {key}") if key in ("metadata", "images") else cell


def _parquet(table: Path) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows: list[dict[str, Any]] = pq.read_table(io.BytesIO(_bytes(table, _LARGEST_TABLE))).to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"{table} cannot be read as parquet: {one_line(error)}") from None
    return rows


def _of_row(table: Path, where: str, row: dict[str, Any]) -> Sample:
    named = {part: row.pop(part) for part in PARTS if part in row}
    if not named:
        raise ConfigError(f"{where}: names no media; expected a path as image, video or audio")
    for part, name in named.items():
        if not isinstance(name, str) or not name or "\0" in name:
            raise ConfigError(f"{where}: {part}: expected a path, got {repr(name)[:200]}")
    more = row.pop("metadata", {})
    if not isinstance(more, dict):
        raise ConfigError(f"{where}: metadata: expected an object, got {repr(more)[:200]}")
    if clash := sorted({*more} & {*row, "prompt", "target", "image", "images"}):
        raise ConfigError(f"{where}: metadata: {clash[0]!r} is a column of the table, too")
    try:
        text = msgspec.json.encode({**row, **more}).decode()
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{where}: {one_line(error)}") from None
    prompt = _with_images(parse_object(0, text, where), table)
    files = {part: table.parent / name for part, name in named.items()}
    return Sample(redact.one_line(", ".join(named.values())), files, prompt)


def _with_images(prompt: Prompt, file: Path) -> Prompt:
    """Return the prompt with the images that it carries found; their paths are relative to the file that names them."""
    images = [prompt_image(file.parent / image.path, f"{file}: image {image.path[:200]!r}") for image in prompt.images]
    return replace(prompt, images=tuple(images))


def _text(file: Path, largest: int) -> str:
    try:
        return _bytes(file, largest).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text: {error.reason}") from None


def _bytes(file: Path, largest: int) -> bytes:
    try:
        return read_file(file, largest)
    except TooLargeError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from None
