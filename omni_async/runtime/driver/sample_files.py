"""Writes a run's sample files, one task per event, so no event waits until media are fetched or drawn.

Each update or validation round has these files, here for update 10 (tiles count from 0):
- `samples/train-000010.png`: a grid with a tile per shown sample.
- `samples/train-000010-03.png`, `.mp4` and `.wav`: the image, video and sound of tile 3. A text has
  `samples/train-000010-03-question.png`, the first image of its prompt.
- `samples/train-000010.jsonl`: a table of their prompts, and of texts, for `omni-async score`.

A task waits for the media (unblocked by the store), then until files may be saved (unblocked by `may_save`, which is
set once the run's folder belongs to this attempt). A sample that cannot be drawn or written is reported and ends
nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from omni_async.aio.threads import in_daemon_thread
from omni_async.config.writing import replacing, write_atomic
from omni_async.control.events import RunEvent, Shown
from omni_async.media import Media
from omni_async.records.write.images import caption, image_grid, tile, write_media, write_question
from omni_async.records.write.rundir import RunDirectory
from omni_async.records.write.sinks.feed import Sinks
from omni_async.store import ObjectStore
from omni_async.types import Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

_PARTS = {".png": "image", ".mp4": "video", ".wav": "audio"}


class SampleFiles:
    def __init__(self, run: RunDirectory, sinks: Sinks, note: Callable[[str], None]) -> None:
        self.may_save = asyncio.Event()
        self._run = run
        self._sinks = sinks
        self._note = note
        self._drawing: set[asyncio.Task[None]] = set()

    def draw(self, event: RunEvent, store: ObjectStore) -> None:
        """Begin writing the files of an update or a validation round."""
        kind = "validation" if event.kind == "validation" else "train"
        version = event.data["version"]
        task = asyncio.create_task(self._draw(kind, version, event, store), name=f"{kind}-{version:06d}")
        self._drawing.add(task)
        task.add_done_callback(self._drawn)

    async def finish(self, seconds: float, keep: bool) -> None:
        """Wait for unfinished files, `seconds` at most; if they are not to be kept, cancel their tasks instead."""
        drawing = {*self._drawing}
        if not keep:
            for task in drawing:
                task.cancel()
        if drawing:
            await asyncio.wait(drawing, timeout=seconds)

    def _drawn(self, task: asyncio.Task[None]) -> None:
        self._drawing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._note(f"samples of {task.get_name()} were not written: {type(error).__name__}: {error}")

    async def _draw(self, kind: str, version: int, event: RunEvent, store: ObjectStore) -> None:
        media: list[Media] = await asyncio.gather(*(store.get(one.media) for one in event.shown))
        captions = [caption(one.prompt, one.score) for one in event.shown]
        tiles = await in_daemon_thread(lambda: [tile(one) for one in media])
        grid = await in_daemon_thread(image_grid, list(zip(tiles, captions, strict=True)))
        await self.may_save.wait()
        await in_daemon_thread(self._save, grid, media, event.shown, kind, version)

    def _save(self, grid: Image, media: list[Media], shown: Sequence[Shown], kind: str, version: int) -> None:
        name = f"{kind}-{version:06d}"
        with replacing(self._run.samples / f"{name}.png") as unfinished:
            grid.save(unfinished, compress_level=1)  # level 6: 2.7 x the time for .7 of the bytes
        self._sinks.image(grid, kind, version)
        rows = []
        for number, (one, sample) in enumerate(zip(media, shown, strict=True)):
            place = self._run.samples / f"{name}-{number:02d}"
            files = write_media(one, place)
            row = _row(sample, one, files)
            if one.text is not None and (asked := write_question(sample.prompt, place)) is not None:
                row["question"] = asked.name
            rows.append(row)
            for file in files:
                if file.suffix != ".png":  # the grid has images
                    self._sinks.media(file, kind, version)
        lines = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
        write_atomic(self._run.samples / f"{name}.jsonl", lines)


def _row(shown: Shown, media: Media, files: list[Path]) -> dict[str, Any]:
    """Return the row of a sample with its reward."""
    row = sample_row(shown.prompt, media, files)
    if math.isfinite(shown.score.value):
        row["reward"] = shown.score.value
    return row


def sample_row(prompt: Prompt, media: Media, files: list[Path]) -> dict[str, Any]:
    """Return a sample's row of the table: the fields of its prompt, its text, and its files.

    The files are in the table's folder."""
    row: dict[str, Any] = {"prompt": prompt.text}
    if prompt.target is not None:
        row["target"] = prompt.target
    if prompt.metadata:
        row["metadata"] = prompt.metadata
    # `audio` and `video` are the sample's own.
    files_of = {"images": prompt.images, "prompt_audio": prompt.audio, "prompt_video": prompt.video}
    for column, carried in files_of.items():
        if carried and all(file.content is None for file in carried):
            row[column] = [file.path for file in carried]
    if media.text is not None:
        row |= {"text": media.text, "finish": media.finish}
        row |= {} if media.tokens is None else {"tokens": media.tokens}
    return row | {_PARTS[file.suffix]: file.name for file in files}
