"""Finds the samples for `omni-async score`: media files and the prompt of each.

A path is a media file, a folder of them, a table, or the folder of a run, whose tables are in `samples/`. The prompt of
a file comes from one of these:

- a file of the same name with the suffix `.txt` (a prompt) or `.json` (an object as in a prompt file)
- the folder's `prompts.txt` or `prompts.jsonl`, a line per file in the order of their names

A table (`omni_async.data.tables`) has a row per sample with `prompt` and its media as `image`, `video` and `audio`
(paths relative to the table), or without them its `text` itself. It may have `target`, `images` and `prompt_audio`
(the prompt's) and `metadata`; other columns are metadata, too. A folder with `metadata.jsonl` is a table, whose
`file_name` names the media.

A path on the command line may point anywhere. A folder or a table is input: its files must be in it or below, links
included. Files of prompts may also be in the folders of the recipe's prompt files.

Opens no media. Raises a ConfigError of one line for an invalid sample, before anything is scored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from omni_async.config import ConfigError, redact
from omni_async.config.reading import is_within, require_file
from omni_async.data.audio_files import prompt_audio
from omni_async.data.folders import caption_of, folder_table, metadata_of, require_inside, sorted_files
from omni_async.data.image_files import one_line, prompt_image
from omni_async.data.media_files import SUFFIXES, part_of, read_media
from omni_async.data.prompts import load_prompts, named_audio, prompt_of
from omni_async.data.tables import LEADS_OUT, NO_COLUMNS, Columns, Table, open_table
from omni_async.data.tables import SUFFIXES as _TABLES
from omni_async.media import Media
from omni_async.plugins.families import ARRAYS
from omni_async.types import Prompt, PromptFile

_PROMPT_FILES = ("prompts.txt", "prompts.jsonl")
_GRID = re.compile(r"(train|validation)-\d{6}")  # a run's grid; its tiles have an additional number
# A run's own reward, and its copy of a prompt's image, are left out; the prompt's metadata have a separate key.
_OF_RUN: Columns = {"reward": None, "question": None}


class Sample(Struct, frozen=True):
    """A sample to score: its files by part of media, or its text; and its prompt.

    `name` is its name in results, with control characters and characters that no file can hold escaped. `within` is the
    folder that must contain the files when they are opened; None if the user named them."""

    name: str
    files: dict[str, Path]
    prompt: Prompt
    within: Path | None = None
    text: Media | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of its media."""
        return tuple(self.files) if self.text is None else ("text",)

    def media(self) -> Media:
        """Return the media, decoded from the files. Raises ConfigError, one line."""
        return read_media(self.files, self.within) if self.text is None else self.text


def find_samples(
    paths: list[Path],
    max_chars: int,
    images_in: Sequence[Path] = (),
    columns: Columns = NO_COLUMNS,
) -> list[Sample]:
    """Return all samples, numbered consecutively, in the order of the paths and of names in a folder.

    Args:
        paths: as the user named them.
        max_chars: the largest number of characters of a prompt in a prompt file.
        images_in: folders that may contain files of prompts, in addition to the folder of the file that names them.
        columns: names of the tables' columns by field, as `data.columns`; tables of a run have their own.

    Raises:
        ConfigError: an invalid sample, in one line."""
    found = [sample for path in paths for sample in _samples_of(path, max_chars, images_in, columns)]
    return [replace(sample, prompt=replace(sample.prompt, index=i)) for i, sample in enumerate(found)]


def files_read(paths: list[Path], samples: list[Sample]) -> list[Path]:
    """Return the files that `find_samples` and scoring read for these paths."""
    media = [file for sample in samples for file in sample.files.values()]
    prompts = [sample.prompt for sample in samples]
    carried = [Path(file.path) for prompt in prompts for file in (*prompt.images, *prompt.audio) if file.path]
    beside = (file.with_suffix(suffix) for file in media for suffix in (".txt", ".json"))
    sidecars = [file for file in beside if os.path.isfile(file)]  # noqa: PTH113 (pathlib raises at long names)
    folders = {folder for path in paths if path.is_dir() for folder in (path, path / "samples")}
    kinds = ("prompts.txt", "*.jsonl", "metadata.*")
    lists = [file for folder in folders for kind in kinds for file in folder.glob(kind)]
    return [*(path for path in paths if not path.is_dir()), *media, *carried, *sidecars, *lists]


def _samples_of(path: Path, max_chars: int, images_in: Sequence[Path], columns: Columns) -> list[Sample]:
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or one_line(error)}") from None
    if not exists:
        raise ConfigError(f"{path}: no such file or folder")
    if is_folder:
        return _of_folder(path, max_chars, images_in, columns)
    if (part := part_of(path)) is not None:
        return [Sample(redact.one_line(str(path)), {part: path}, _sidecar(path) or Prompt(0, ""))]
    if path.suffix.lower() in _TABLES[1:]:  # a text has no media
        return _of_table(open_table(path), images_in, _OF_RUN if _is_of_run(path) else columns)
    known = ", ".join([*SUFFIXES, *_TABLES[1:]])
    raise ConfigError(f"{path}: expected a folder or a file with one of the suffixes {known}")


# ---- folders ---------------------------------------------------------------------------------------------------------


def _of_folder(folder: Path, max_chars: int, images_in: Sequence[Path], columns: Columns) -> list[Sample]:
    outer = folder
    if (folder / "samples").is_dir() and (folder / "config.yaml").is_file():  # of a run
        folder = folder / "samples"
        if not is_within(folder, outer):
            raise ConfigError(f"{folder}: {LEADS_OUT}")
    tables = [file for file in sorted_files(folder, str(folder)) if _is_of_run(file)]
    if tables:
        found = (_of_table(open_table(table, within=folder), images_in, _OF_RUN) for table in tables)
        return [sample for samples in found for sample in samples]
    if metadata_of(folder) is not None:
        return _of_table(folder_table(folder, str(folder), ""), images_in, columns)
    files = [file for file in sorted_files(folder, str(folder)) if part_of(file) is not None]
    if not files:
        raise ConfigError(f"{folder}: holds no media; expected files with one of the suffixes {', '.join(SUFFIXES)}")
    require_inside(files, folder)
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


def _sidecar(file: Path) -> Prompt | None:
    """Return the prompt in the text or JSON file of a media file, if one exists."""
    if (found := caption_of(file, file.parent)) is None:
        return None
    where, fields = str(found[0]), found[1]
    prompt = Prompt(0, fields["prompt"]) if found[0].suffix == ".txt" else prompt_of(0, fields, where)
    return _with_files(_without_nul(prompt, where), where, file.parent)


# ---- tables ----------------------------------------------------------------------------------------------------------


def _is_of_run(file: Path) -> bool:
    """Return whether the file is a table that a run wrote for its samples."""
    return file.suffix == ".jsonl" and _GRID.fullmatch(file.stem) is not None


def _of_table(table: Table, images_in: Sequence[Path], columns: Columns) -> list[Sample]:
    samples = [
        _of_row(table.folder, where, {key: cell for key, cell in fields().items() if cell is not None}, images_in)
        for where, _, fields in table.rows(columns)
    ]
    if not samples:
        raise ConfigError(f"{table.name}: holds no rows")
    return samples


def _of_row(folder: Path, where: str, row: dict[str, Any], images_in: Sequence[Path]) -> Sample:
    named = {part: row.pop(part) for part in ARRAYS if part in row}
    text = None if named else text_of(where, row)  # next to files, a column of that name is metadata
    if not named and text is None:
        raise ConfigError(f"{where}: names no media; expected a path as image, video or audio, or a text")
    files = {part: _named(folder, name, f"{where}: {part}") for part, name in named.items()}
    more = row.pop("metadata", {})
    if not isinstance(more, dict):
        raise ConfigError(f'{where}: metadata: expected an object such as {{"n": 1}}, got {repr(more)[:200]}')
    if clash := sorted({*more} & {*row, "prompt", "target", "image", "images"}):
        raise ConfigError(f"{where}: metadata: {clash[0]!r} is a column of the table, too")
    audio = named_audio(row.pop("prompt_audio", []), f"{where}: prompt_audio")
    prompt = replace(prompt_of(0, {**row, **more}, where), audio=audio)
    prompt = _with_files(_without_nul(prompt, where), where, folder, images_in)
    name = ", ".join(named.values()) if named else where
    return Sample(redact.one_line(name), files, prompt, folder, text)


def text_of(where: str, row: dict[str, Any]) -> Media | None:
    """Take a sample's text out of its row; None if it has none. ConfigError begins with `where`."""
    if "text" not in row:
        return None
    if not isinstance(tokens := row.pop("tokens", None), int | None):
        raise ConfigError(f"{where}: tokens: expected a whole number, got {repr(tokens)[:200]}")
    if (finish := row.pop("finish", "stop")) not in ("stop", "length"):
        raise ConfigError(f"{where}: finish: expected stop or length, got {repr(finish)[:200]}")
    try:
        return Media(text=row.pop("text"), finish=finish, tokens=tokens)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


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


def _with_files(prompt: Prompt, where: str, folder: Path, images_in: Sequence[Path] = ()) -> Prompt:
    """Return the prompt with its files located; their paths are relative to the file that names them."""

    def found(carried: PromptFile) -> tuple[Path, str, Path]:
        shown = f"{where}: {carried.part}"
        file = _named(folder, carried.path, shown, images_in)
        within = next(one for one in (folder, *images_in) if is_within(file, one))
        return file, f"{shown} {carried.path[:200]!r}", within

    images = [prompt_image(file, shown, within=within) for file, shown, within in map(found, prompt.images)]
    audio = [prompt_audio(*found(one)) for one in prompt.audio]
    return replace(prompt, images=tuple(images), audio=tuple(audio))
