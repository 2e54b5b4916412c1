"""Writes a run's sample files, those of an event in a task of its own: no event waits for media to be fetched or drawn.

An update or validation round has a grid, `samples/train-000010.png`, say, with a tile per sample that is shown; the
video and the sound of tile 3 are `samples/train-000010-03.mp4` and `.wav`, counted from 0. A task waits for the media
(unblocked by the store), then until files may be saved (unblocked by `may_save`, which is set once the run's folder is
this attempt's). What cannot be drawn or written is reported and ends nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from omni_async.control.events import RunEvent
from omni_async.media import Media
from omni_async.store import ObjectStore
from omni_async.tracking.images import caption, image_grid, tile, write_media
from omni_async.tracking.mlflow_sink import MlflowSink
from omni_async.tracking.rundir import RunDirectory

if TYPE_CHECKING:
    from PIL.Image import Image


class SampleFiles:
    def __init__(self, run: RunDirectory, mlflow: MlflowSink | None, note: Callable[[str], None]) -> None:
        self.may_save = asyncio.Event()
        self._run = run
        self._mlflow = mlflow
        self._note = note
        self._drawing: set[asyncio.Task[None]] = set()

    def draw(self, event: RunEvent, store: ObjectStore) -> None:
        """Begin the files of an update or a validation round."""
        kind = "validation" if event.kind == "validation" else "train"
        version = event.data["version"]
        task = asyncio.create_task(self._draw(kind, version, event, store), name=f"{kind}-{version:06d}")
        self._drawing.add(task)
        task.add_done_callback(self._drawn)

    async def finish(self, seconds: float, keep: bool) -> None:
        """Wait for the files that were begun, `seconds` at most; give them up instead unless they are to be kept."""
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
        tiles = await asyncio.to_thread(lambda: [tile(one) for one in media])
        grid = await asyncio.to_thread(image_grid, list(zip(tiles, captions, strict=True)))
        await self.may_save.wait()
        await asyncio.to_thread(self._save, grid, media, kind, version)

    def _save(self, grid: Image, media: list[Media], kind: str, version: int) -> None:
        name = f"{kind}-{version:06d}"
        grid.save(self._run.samples / f"{name}.png")
        if self._mlflow:
            self._mlflow.log_image(grid, kind, version)
        for number, one in enumerate(media):
            for file in write_media(one, self._run.samples / f"{name}-{number:02d}"):
                if self._mlflow:
                    self._mlflow.log_artifact(file, self._run.samples.name)
