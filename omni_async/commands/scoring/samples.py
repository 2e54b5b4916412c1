"""Finds the samples for `omni-async score`: media files and the prompt of each.

A path is a media file, a folder of them, a table, or the folder of a run, whose tables are in `samples/`. The prompt of
a file comes from one of these:

- a file of the same name with the suffix `.txt` (a prompt) or `.json` (an object as in a prompt file)
- the folder's `prompts.txt` or `prompts.jsonl`, a line per file in the order of their names

A table, `.jsonl`, `.csv` or `.parquet`, has a row per sample with `prompt` and its media as `image`, `video` and
`audio` (paths relative to the table). It may have `target`, `images` (the prompt's images) and `metadata`; other
columns are metadata, too.

A path on the command line may point anywhere. A folder or a table is input: its files must be in it or below, links
included. Images of prompts may also be in the folders of the recipe's prompt files.

Opens no media. Raises a ConfigError of one line for an invalid sample, before anything is scored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from omni_async.commands.scoring.tables import LEADS_OUT, rows
from omni_async.commands.scoring.tables import SUFFIXES as _TABLES
from omni_async.config import ConfigError, redact
from omni_async.config.reading import OutsideError, is_within, read_file, require_file
from omni_async.data.image_files import one_line, prompt_image
from omni_async.data.media_files import SUFFIXES, part_of
from omni_async.data.prompts import load_prompts, parse_object
from omni_async.plugins.families import PARTS
from omni_async.types import Prompt

_PROMPT_FILES = ("prompts.txt", "prompts.jsonl")
_GRID = re.compile(r"(train|validation)-\d{6}")  # a run's grid; its tiles have an additional number
_LARGEST_SIDECAR = 2**20


class Sample(Struct, frozen=True):
    """A sample to score: its files by part of media, and its prompt.

    `name` is its name in results, with control characters and characters that no file can hold escaped. `within` is the
    folder that must contain the files when they are opened; None if the user named them."""

    name: str
    files: dict[str, Path]
    prompt: Prompt
    within: Path | None = None


def find_samples(paths: list[Path], max_chars: int, images_in: Sequence[Path] = ()) -> list[Sample]:
    """Return all samples, numbered consecutively, in the order of the paths and of names in a folder.

    Args:
        paths: as the user named them.
        max_chars: the largest number of characters of a prompt in a prompt file.
        images_in: folders that may contain images of prompts, in addition to the folder of the file that names them.

    Raises:
        ConfigError: an invalid sample, in one line."""
    found = [sample for path in paths for sample in _samples_of(path, max_chars, images_in)]
    return [replace(sample, prompt=replace(sample.prompt, index=i)) for i, sample in enumerate(found)]


def files_read(paths: list[Path], samples: list[Sample]) -> list[Path]:
    """Return the files that `find_samples` and scoring read for these paths."""
    media = [file for sample in samples for file in sample.files.values()]
    images = [Path(image.path) for sample in samples for image in sample.prompt.images if image.path]
    beside = (file.with_suffix(suffix) for file in media for suffix in (".txt", ".json"))
    sidecars = [file for file in beside if os.path.isfile(file)]  # noqa: PTH113 (pathlib raises at long names)
    folders = {folder for path in paths if path.is_dir() for folder in (path, path / "samples")}
    lists = [file for folder in folders for file in (*folder.glob("prompts.txt"), *folder.glob("*.jsonl"))]
    return [*(path for path in paths if not path.is_dir()), *media, *images, *sidecars, *lists]


def _samples_of(path: Path, max_chars: int, images_in: Sequence[Path]) -> list[Sample]:
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or one_line(error)}") from None
    if not exists:
        raise ConfigError(f"{path}: no such file or folder")
    if is_folder:
        return _of_folder(path, max_chars, images_in)
    if (part := part_of(path)) is not None:
        return [Sample(redact.one_line(str(path)), {part: path}, _sidecar(path) or Prompt(0, ""))]
    if path.suffix.lower() in _TABLES:
        return _of_table(path, images_in)
    known = ", ".join([*SUFFIXES, *_TABLES])
    raise ConfigError(f"{path}: expected a folder or a file with one of the suffixes {known}")


# ---- folders ---------------------------------------------------------------------------------------------------------


def _of_folder(folder: Path, max_chars: int, images_in: Sequence[Path]) -> list[Sample]:
    outer = folder
    if (folder / "samples").is_dir() and (folder / "config.yaml").is_file():  # of a run
        folder = folder / "samples"
        if not is_within(folder, outer):
            raise ConfigError(f"{folder}: {LEADS_OUT}")
    tables = [file for file in _sorted(folder) if _is_of_run(file)]
    if tables:
        return [sample for table in tables for sample in _of_table(table, images_in, folder)]
    files = [file for file in _sorted(folder) if part_of(file) is not None]
    if not files:
        raise ConfigError(f"{folder}: holds no media; expected files with one of the suffixes {', '.join(SUFFIXES)}")
    if outside := next((file for file in files if not is_within(file, folder)), None):
        raise ConfigError(f"{outside}: {LEADS_OUT}")
    listed = [folder / name for name in _PROMPT_FILES if (folder / name).is_file()]
    prompts = [_sidecar(file) for file in files]
    if listed:
        lines = load_prompts(str(listed[0]), "prompts", max_chars, within=folder)
        if len(lines) != len(files):
            raise ConfigError(f"{listed[0]}: {len(lines)} prompts for {len(files)} files; expected a line per file")
        prompts = [own or line for own, line in zip(prompts, lines, strict=True)]
    return [
        Sample(redact.one_line(str(file)), {part_of(file) or "": file}, prompt or Prompt(0, ""), folder)
        for file, prompt in zip(files, prompts, strict=True)
    ]


def _sorted(folder: Path) -> list[Path]:
    try:
        return sorted(file for file in folder.iterdir() if file.is_file())
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror or error}") from None


def _sidecar(file: Path) -> Prompt | None:
    """Return the prompt in the text or JSON file of a media file, if one exists."""
    text, fields = file.with_suffix(".txt"), file.with_suffix(".json")
    if os.path.isfile(fields):  # noqa: PTH113 (pathlib raises where a name has too many bytes)
        prompt = parse_object(0, _text(fields, file.parent), str(fields))
        return _with_images(_without_nul(prompt, str(fields)), str(fields), file.parent)
    if os.path.isfile(text):  # noqa: PTH113
        return _without_nul(Prompt(0, " ".join(_text(text, file.parent).split())), str(text))
    return None


# ---- tables ----------------------------------------------------------------------------------------------------------


def _is_of_run(file: Path) -> bool:
    """Return whether the file is a table that a run wrote for its samples."""
    return file.suffix == ".jsonl" and _GRID.fullmatch(file.stem) is not None


def _of_table(table: Path, images_in: Sequence[Path], within: Path | None = None) -> list[Sample]:
    of_run = _is_of_run(table)
    samples = []
    for where, row in rows(table, within):
        if of_run:
            row.pop("reward", None)  # the run's own reward; the prompt's metadata have a separate key
        samples.append(_of_row(table, where, row, images_in))
    if not samples:
        raise ConfigError(f"{table}: holds no rows")
    return samples


def _of_row(table: Path, where: str, row: dict[str, Any], images_in: Sequence[Path]) -> Sample:
    named = {part: row.pop(part) for part in PARTS if part in row}
    if not named:
        raise ConfigError(f"{where}: names no media; expected a path as image, video or audio")
    files = {part: _named(table.parent, name, f"{where}: {part}") for part, name in named.items()}
    more = row.pop("metadata", {})
    if not isinstance(more, dict):
        raise ConfigError(f"{where}: metadata: expected an object, got {repr(more)[:200]}")
    if clash := sorted({*more} & {*row, "prompt", "target", "image", "images"}):
        raise ConfigError(f"{where}: metadata: {clash[0]!r} is a column of the table, too")
    prompt = parse_object(0, msgspec.json.encode({**row, **more}).decode(), where)
    prompt = _with_images(_without_nul(prompt, where), where, table.parent, images_in)
    return Sample(redact.one_line(", ".join(named.values())), files, prompt, table.parent)


def _named(folder: Path, name: Any, where: str, images_in: Sequence[Path] = ()) -> Path:
    """Return the file that a table or a prompt names; open nothing. ConfigError begins with `where`."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise ConfigError(f"{where}: expected a path, got {repr(name)[:200]}")
    try:
        file = folder / name
        if not any(is_within(file, one) for one in (folder, *images_in)):
            raise ConfigError(f"{where}: {name[:200]!r} {LEADS_OUT}")
        # A missing file, or one without media, is an error of its sample. A pipe or a device is never media.
        if file.exists():
            require_file(file)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        why = getattr(error, "strerror", None) or one_line(error)
        raise ConfigError(f"{where}: {name[:200]!r} is no usable path: {why}") from None
    return file


def _without_nul(prompt: Prompt, where: str) -> Prompt:
    if "\0" in prompt.text or "\0" in (prompt.target or ""):
        raise ConfigError(f"{where}: holds the character U+0000, where tokenizers may end a text")
    return prompt


def _with_images(prompt: Prompt, where: str, folder: Path, images_in: Sequence[Path] = ()) -> Prompt:
    """Return the prompt with its images located; their paths are relative to the file that names them."""
    images = []
    for image in prompt.images:
        file = _named(folder, image.path, f"{where}: image", images_in)
        within = next(one for one in (folder, *images_in) if is_within(file, one))
        images.append(prompt_image(file, f"{where}: image {image.path[:200]!r}", within=within))
    return replace(prompt, images=tuple(images))


def _text(file: Path, within: Path) -> str:
    try:
        content = read_file(file, _LARGEST_SIDECAR, within)
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{file}:{number}: not UTF-8 text: {error.reason}") from None
    except OutsideError:
        raise ConfigError(f"{file}: {LEADS_OUT}") from None
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from None
