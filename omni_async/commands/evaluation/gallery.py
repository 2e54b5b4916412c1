"""Stores generated samples in a folder, so that an interrupted command resumes without drawing them again.

    settings.json                settings and weights of the samples; with other settings the folder is refused
    base/000-1.png               the image of sample 1 of prompt 0; also .mp4 and .wav
    base/samples.jsonl           a row per sample, appended when its files are whole; `omni-async score` reads it. The
                                 row of a text has the text itself, and the sample's name as `sample_id`
    scores.jsonl                 a row per score

A sample without a row is drawn again.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from omni_async.commands.evaluation.models import Model
from omni_async.commands.scoring.samples import Sample, text_of
from omni_async.config import ConfigError
from omni_async.config.decoding import decode_json
from omni_async.config.reading import TooLargeError, read_file, require_file
from omni_async.config.redact import shown
from omni_async.config.writing import is_partial, open_lock, write_atomic
from omni_async.media import Media
from omni_async.plugins.families import ARRAYS
from omni_async.records.write.files import keep_from_children, read_records
from omni_async.records.write.images import write_media
from omni_async.records.write.rundir import append_jsonl
from omni_async.rewards.base import LONGEST_NAME, MOST_PARTS
from omni_async.runtime.driver.sample_files import sample_row
from omni_async.types import Prompt, SampleRequest, Score

T = TypeVar("T")

TABLE = "samples.jsonl"
_NAME = "sample_id"  # in the row of a text
_SETTINGS, _SCORES, _LOCK = "settings.json", "scores.jsonl", ".lock"
_LARGEST_SETTINGS = 2**26  # bytes
_LARGEST_SCORE = 1e100  # as `rewards/base.py` bounds a score's parts
_UNNAMED = {"noise": "torch"}  # settings that earlier versions did not write


class Kept(msgspec.Struct, frozen=True):
    """A score on disk, with its model, prompt (its number) and sample."""

    model: str
    prompt: int
    sample: int
    score: Score


class Gallery:
    """The folder of one evaluation, locked while this process has it."""

    def __init__(self, folder: Path, settings: dict[str, Any], models: list[Model]) -> None:
        """Open the folder, or create it. Use as a context, which unlocks it at the end.

        Args:
            folder: an empty folder, one from an earlier evaluation, or a path that does not exist.
            settings: the inputs of samples and scores, besides the models, as plain values.
            models: the models to draw with.

        Raises:
            ConfigError: it holds something else, or cannot be written; one line."""
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = keep_from_children(open_lock(folder / _LOCK))
        except BlockingIOError:
            raise ConfigError(f"--out: another process is at work in {folder}") from None
        except OSError as error:
            raise ConfigError(f"--out: {folder} cannot be used: {error.strerror or error}") from None
        try:
            self._settle(settings, {model.label: [str(model.base), model.identity()] for model in models})
            self._drawn = {model.label: self._rows(model.label) for model in models}
            self._scores = self._records(folder / _SCORES, Kept)
            for kept in self._scores:
                _require_possible(folder / _SCORES, kept)
            self._rewrite(folder / _SCORES, self._scores)
        except OSError as error:
            self._lock.close()
            raise ConfigError(f"--out: {folder} cannot be used: {error.strerror or error}") from None
        except ConfigError:
            self._lock.close()
            raise

    def __enter__(self) -> Gallery:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def _settle(self, settings: dict[str, Any], models: dict[str, Any]) -> None:
        """Compare the requested settings with the folder's settings, and write them."""
        file = self.folder / _SETTINGS
        asked = msgspec.json.decode(msgspec.json.encode({**settings, "models": models}))
        if not os.path.lexists(file):
            if found := [path.name for path in self.folder.iterdir() if path.name != _LOCK and not is_partial(path)]:
                raise ConfigError(f"--out: {self.folder} holds {found[0]!r} and no {_SETTINGS}; name another folder")
            held: dict[str, Any] = {}
        else:
            try:
                held = _UNNAMED | decode_json(read_file(file, _LARGEST_SETTINGS, within=self.folder), dict[str, Any])
            except (TooLargeError, msgspec.MsgspecError):
                raise ConfigError(f"--out: {file} is damaged; name another folder") from None
        for key in asked.keys() & held.keys() - {"models"}:
            if held[key] != asked[key]:
                raise ConfigError(
                    f"--out: {self.folder} was made with {key} {_brief(held[key])}, not {_brief(asked[key])}; name"
                    " another folder"
                )
        before = held.get("models", {})
        if not isinstance(before, dict):
            raise ConfigError(f"--out: {file} is damaged; name another folder")
        # A model is identified by its weights; its recorded path is only informative.
        if changed := [label for label in models if label in before and _weights(before[label]) != models[label][1]]:
            raise ConfigError(
                f"--out: {self.folder} holds samples of other weights as {changed[0]}; name another folder"
            )
        asked["models"] = {**before, **asked["models"]}
        write_atomic(file, msgspec.json.format(msgspec.json.encode({**held, **asked}), indent=1) + b"\n")

    def _rows(self, label: str) -> dict[str, dict[str, Any]]:
        """Return the rows of a model's table whose files exist, and remove an incomplete last row."""
        folder = self.folder / label
        if folder.is_symlink():
            raise OSError(errno.EINVAL, f"{label} is a link, not a folder")
        folder.mkdir(exist_ok=True)
        rows: list[dict[str, Any]] = self._records(folder / TABLE, dict[str, Any])
        whole = [row for row in rows if _name_in(row) and all(map(self._holds, _files(folder, row).values()))]
        self._rewrite(folder / TABLE, whole)
        return {_name_in(row): row for row in whole}

    def _records(self, file: Path, kind: type[T]) -> list[T]:
        if os.path.lexists(file):
            require_file(file, within=self.folder)
        return read_records(file, kind)

    def _holds(self, file: Path) -> bool:
        try:
            require_file(file, within=self.folder)
        except (OSError, ValueError):
            return False
        return True

    @staticmethod
    def _rewrite(file: Path, records: list[Any]) -> None:
        if file.exists():
            write_atomic(file, b"".join(msgspec.json.encode(record) + b"\n" for record in records))

    @property
    def labels(self) -> list[str]:
        """The models' labels, which are also the names of their folders."""
        return [*self._drawn]

    def has(self, label: str, request: SampleRequest) -> bool:
        """Return whether a model's sample exists."""
        return _name(request) in self._drawn[label]

    def add(self, label: str, request: SampleRequest, media: Media) -> None:
        """Write a model's sample. If it raises OSError, no row was added."""
        folder = self.folder / label
        files = write_media(media, folder / _name(request))
        row = sample_row(request.prompt, media, files) | ({} if files else {_NAME: _name(request)})
        append_jsonl(folder / TABLE, row)
        self._drawn[label][_name(request)] = row

    def sample(self, label: str, request: SampleRequest) -> Sample | None:
        """Return a sample; None if it was not drawn. Raises ConfigError, one line, for a damaged text."""
        row = self._drawn[label].get(_name(request))
        if row is None:
            return None
        files, name = _files(self.folder / label, row), f"{label}/{_name(request)}"
        text = None if files else text_of(f"{self.folder / label / TABLE}: {_name(request)}", dict(row))
        return Sample(name, files, request.prompt, self.folder, text)

    @property
    def scores(self) -> dict[str, dict[tuple[int, int], Score]]:
        """The scores of every model, by prompt and sample."""
        found: dict[str, dict[tuple[int, int], Score]] = {label: {} for label in self._drawn}
        for kept in self._scores:
            if kept.model in found:
                found[kept.model][kept.prompt, kept.sample] = kept.score
        return found

    def add_score(self, label: str, prompt: Prompt, sample: int, score: Score) -> None:
        """Write a score. Raises OSError."""
        kept = Kept(label, prompt.index, sample, score)
        append_jsonl(self.folder / _SCORES, kept)
        self._scores.append(kept)


def _require_possible(file: Path, kept: Kept) -> None:
    """Raise ConfigError for a score that no scorer can have given; the statistics would square it."""
    numbers, names = (kept.score.value, *kept.score.parts.values()), kept.score.parts
    has_parts = len(names) <= MOST_PARTS and all(len(name) <= LONGEST_NAME for name in names)
    in_range = all(abs(number) <= _LARGEST_SCORE for number in numbers) and 0 <= kept.prompt < 2**31
    if not (has_parts and in_range):
        raise ConfigError(
            f"--out: {file} is damaged: the score of {kept.model[:80]!r}, prompt {str(kept.prompt)[:20]}, is out of"
            " range; remove its line, or name another folder"
        )


def _name(request: SampleRequest) -> str:
    return f"{request.prompt.index:03d}-{request.sample}"


def _files(folder: Path, row: dict[str, Any]) -> dict[str, Path]:
    return {part: folder / Path(row[part]).name for part in ARRAYS if isinstance(row.get(part), str)}


def _name_in(row: dict[str, Any]) -> str:
    """Return the name of a row's sample, from its files or, for a text, its own; empty if it has neither."""
    if files := _files(Path(), row):
        return next(iter(files.values())).stem
    return row[_NAME] if isinstance(row.get("text"), str) and isinstance(row.get(_NAME), str) else ""


def _weights(entry: Any) -> str | None:
    """Return the identity of a model's weights from its entry in the settings: path and identity."""
    return entry[1] if isinstance(entry, list) and len(entry) == 2 else None


def _brief(value: Any) -> str:
    text = shown(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
