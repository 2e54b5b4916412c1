"""Reads prompts from a table.

A row has `prompt`, optionally `negative_prompt`, `target`, `images` (paths relative to the table; a single one may be
given as `image`), `video` and `audio` (a path or several), and any other keys. Parquet and Arrow files may hold the
files' bytes themselves.

A wrong row or an invalid file stops the run before anything starts; the error has the row's place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from omni_async.config import ConfigError
from omni_async.data.bad_places import BadPlaces
from omni_async.data.rows import EXAMPLE
from omni_async.data.tables import NO_COLUMNS, Columns, NoColumnError, Table, open_table
from omni_async.types import Prompt, PromptAudio, PromptFile, PromptImage, PromptVideo

File = TypeVar("File", bound=PromptFile)

# Images and frames: some twenty seconds on one core. Beyond it, only headers, checksums and first frames are read.
_PIXELS_DECODED = 2**30
_NO_FIELD = "expected a field `prompt`, got "
_KEYS = ("prompt", "negative_prompt", "target", "image", "images")

# Returns why a scorer or the model cannot use a prompt, None if it can.
PromptCheck = Callable[[Prompt], str | None]
# Returns problems of prompts by position, given all of them; their images have been found.
WholeCheck = Callable[[Sequence[Prompt]], Mapping[int, str]]


def load_prompts(
    path: str,
    key: str,
    max_chars: int,
    checks: Sequence[PromptCheck] = (),
    whole: WholeCheck | None = None,
    within: Path | None = None,
    columns: Columns = NO_COLUMNS,
) -> list[Prompt]:
    """Read the prompts of a table.

    Args:
        path: a file or a folder (`tables`).
        key: the configuration path that named it, for messages.
        max_chars: maximum number of characters of a prompt.
        checks: requirements of scorers and the model on every prompt.
        whole: the model's requirements, checked once over all prompts that pass.
        within: the folder that the file must not leave, links included; None if the user named it.
        columns: names of columns by field, as `data.columns`.

    Raises:
        ConfigError: one line with the numbers of rows that are wrong or refused by a check, at most ten. A wrong name
            of a column is reported once."""
    table = open_table(path, key, within)
    prompts: dict[int, Prompt] = {}
    places: dict[int, str] = {}
    bad = BadPlaces(table.place)
    unnamed = True  # no row has a field `prompt`: a single error, not an error for every row
    try:
        for where, number, found in each_prompt(table, max_chars, checks, columns):
            if isinstance(found, Prompt):
                prompts[number], places[number] = found, where
            else:
                bad.add(where, number, found)
            unnamed = unnamed and isinstance(found, str) and found.startswith(_NO_FIELD)
    except NoColumnError:
        raise
    except ConfigError as error:  # nothing after it can be read
        bad.require_none(str(error))
        raise
    if whole is not None:
        numbers = list(prompts)
        for position, problem in whole([*prompts.values()]).items():
            bad.add(places[numbers[position]], numbers[position], problem)
    if unnamed:
        bad.require_none(most=1)
    bad.require_none()
    if not prompts:
        raise ConfigError(f"{table.name} holds no prompts; expected one a {table.place}")
    return [*prompts.values()]


def each_prompt(
    table: Table, max_chars: int, checks: Sequence[PromptCheck] = (), columns: Columns = NO_COLUMNS
) -> Iterator[tuple[str, int, Prompt | str]]:
    """Yield the place and number of every row, and its prompt, or why it is refused.

    The arguments are those of `load_prompts`. Raises ConfigError where the rest of the table cannot be read."""
    files = _Files(table)
    index = 0
    for where, number, fields in table.rows(columns):
        try:
            prompt = _with_named(prompt_of(index, fields(), where), where)
            _require_text(prompt, where, max_chars)
            for check in checks:
                if (missing := check(prompt)) is not None:
                    raise ConfigError(f"{where}: {missing}")
            if prompt.files:
                prompt = files.found(prompt, where)
        except ConfigError as error:
            yield where, number, str(error).removeprefix(f"{where}: ")
            continue
        index += 1
        yield where, number, prompt


def prompt_of(index: int, fields: dict[str, Any], where: str) -> Prompt:
    """Return the prompt that a row describes; its images are named, but not opened.

    Raises ConfigError, one line that begins with `where`, if the row is invalid."""
    text = fields.get("prompt")
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{where}: {_no_text(fields)}")
    target, negative = fields.get("target"), fields.get("negative_prompt")
    for key, value in (("target", target), ("negative_prompt", negative)):
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{where}: {key}: expected a string, got {repr(value)[:200]}")
    others = {key: value for key, value in fields.items() if key not in _KEYS}
    return Prompt(index, text, target, others, _named_images(fields, where), negative)


def _no_text(fields: dict[str, Any]) -> str:
    """Return why a row has no text of a prompt, and the remedy."""
    if "prompt" not in fields:
        if not fields:
            return f"the row is empty; expected {EXAMPLE}"
        texts = [name for name, cell in fields.items() if isinstance(cell, str)]
        name = next((name for name in ("text", "caption", "Prompt") if name in texts), next(iter(texts), "NAME"))
        got = ", ".join(fields)[:200]
        if len(fields) == 1 and any(mark in got for mark in ";\t|"):
            return f"{_NO_FIELD}{got}; the cells of a .csv are separated by commas, those of a .tsv by tabs"
        return f"{_NO_FIELD}{got}; name its column, as data.columns.prompt={name}"
    if (text := fields["prompt"]) is None or isinstance(text, str):
        return "the prompt is empty; write its text, or remove the row"
    return f"prompt: expected a string, got {repr(text)[:200]}; write it in quotation marks"


def _named_images(fields: dict[str, Any], where: str) -> tuple[PromptImage, ...]:
    """Return the images of the row, without digests: no file is opened yet."""
    if "image" not in fields and "images" not in fields:
        return ()
    if "image" in fields and "images" in fields:
        raise ConfigError(f"{where}: give image or images, not both")
    key, expected = ("image", "a path") if "image" in fields else ("images", "a list of paths")
    given = fields.get(key, [])
    names = [given] if key == "image" else given
    if not isinstance(names, list) or not all(isinstance(name, str | bytes) and name for name in names):
        raise ConfigError(f"{where}: {key}: expected {expected}, got {repr(given)[:200]}")
    return tuple(
        PromptImage(f"{where}, {key}", "", name) if isinstance(name, bytes) else PromptImage(name, "") for name in names
    )


def _with_named(prompt: Prompt, where: str) -> Prompt:
    """Take a prompt's audio and video out of its other fields, without digests: no file is opened yet."""
    if not {"audio", "video"} & prompt.metadata.keys():
        return prompt
    others = dict(prompt.metadata)
    audio = named_files(PromptAudio, others.pop("audio", []), f"{where}: audio")
    video = named_files(PromptVideo, others.pop("video", []), f"{where}: video")
    return replace(prompt, metadata=others, audio=audio, video=video)


def named_files(kind: type[File], given: Any, where: str) -> tuple[File, ...]:
    """Return the files that a cell names or holds, without digests. A ConfigError begins with `where`."""
    names = given if isinstance(given, list) else [given]
    if not all(isinstance(name, str | bytes) and name for name in names):
        raise ConfigError(f"{where}: expected a path or a list of paths, got {repr(given)[:200]}")
    return tuple(kind(where, "", name) if isinstance(name, bytes) else kind(name, "") for name in names)


class _Files:
    """The files that the prompts of one table name or hold, each checked once."""

    def __init__(self, table: Table) -> None:
        """Start empty."""
        self._folder, self._root = table.folder, table.root
        self._checked: dict[tuple[type[PromptFile], Path], Any] = {}
        self._pixels = 0

    def found(self, prompt: Prompt, where: str) -> Prompt:
        """Return the prompt with its files found and checked. A ConfigError begins with `where`."""
        return replace(
            prompt,
            images=tuple(self._of(image, self._image, where) for image in prompt.images),
            audio=tuple(self._of(audio, self._audio, where) for audio in prompt.audio),
            video=tuple(self._of(video, self._video, where) for video in prompt.video),
        )

    def _of(self, file: File, check: Callable[[Path | File, str], File], where: str) -> File:
        from omni_async.data.image_files import find_image

        shown = f"{where}: {file.part}"
        if file.content is not None:
            return check(file, shown)
        source = find_image(self._folder, file.path, shown, "the prompt file's", self._root)
        if (key := (type(file), source)) not in self._checked:
            self._checked[key] = check(source, f"{shown} {file.path[:200]!r}")
        found: File = self._checked[key]
        return found

    def _audio(self, source: Path | PromptAudio, shown: str) -> PromptAudio:
        from omni_async.data.audio_files import prompt_audio

        return prompt_audio(source, shown, self._root)

    def _video(self, source: Path | PromptVideo, shown: str) -> PromptVideo:
        from omni_async.data.video_files import prompt_video

        checked, decoded = prompt_video(source, shown, self._pixels < _PIXELS_DECODED, self._root)
        self._pixels += decoded
        return checked

    def _image(self, source: Path | PromptImage, shown: str) -> PromptImage:
        from omni_async.data.image_files import image_size, prompt_image

        checked = prompt_image(source, shown, self._pixels < _PIXELS_DECODED, self._root)
        width, height = image_size(checked)
        self._pixels += width * height
        return checked


def _require_text(prompt: Prompt, where: str, max_chars: int) -> None:
    negative = prompt.negative_prompt or ""
    for what, text in (("prompt", prompt.text), ("negative prompt", negative)):
        if len(text) > max_chars:
            allowed = f"data.max_prompt_chars allows {max_chars}"
            raise ConfigError(f"{where}: the {what} has {len(text)} characters, {allowed}")
    if "\0" in prompt.text or "\0" in (prompt.target or "") or "\0" in negative:
        raise ConfigError(f"{where}: holds the character U+0000, where tokenizers may end a text; is this a text file?")
