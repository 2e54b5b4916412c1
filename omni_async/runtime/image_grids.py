"""Draws a run's image grids, each in a task of its own: no event waits for an image to be fetched or drawn.

A task waits for the images (unblocked by the store), then until files may be saved (unblocked by `may_save`, which is
set once the run's folder is this attempt's). An image that cannot be drawn is reported and ends nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from omni_async.control.events import RunEvent
from omni_async.store import ObjectStore
from omni_async.tracking.images import caption, image_grid
from omni_async.tracking.mlflow_sink import MlflowSink
from omni_async.tracking.rundir import RunDirectory

if TYPE_CHECKING:
    from PIL.Image import Image


class ImageGrids:
    def __init__(self, run: RunDirectory, mlflow: MlflowSink | None, note: Callable[[str], None]) -> None:
        self.may_save = asyncio.Event()
        self._run = run
        self._mlflow = mlflow
        self._note = note
        self._drawing: set[asyncio.Task[None]] = set()

    def draw(self, event: RunEvent, store: ObjectStore) -> None:
        """Begins the grid of an update or a validation round, `samples/train-000010.png`, say."""
        kind = "validation" if event.kind == "validation" else "train"
        version = event.data["version"]
        task = asyncio.create_task(self._draw(kind, version, event, store), name=f"{kind}-{version:06d}")
        self._drawing.add(task)
        task.add_done_callback(self._drawn)

    async def finish(self, seconds: float, keep: bool) -> None:
        """Waits for the grids that were begun, `seconds` at most; gives them up instead unless they are to be kept."""
        drawing = {*self._drawing}
        if not keep:
            for task in drawing:
                task.cancel()
        if drawing:
            await asyncio.wait(drawing, timeout=seconds)

    def _drawn(self, task: asyncio.Task[None]) -> None:
        self._drawing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._note(f"image {task.get_name()} was not drawn: {type(error).__name__}: {error}")

    async def _draw(self, kind: str, version: int, event: RunEvent, store: ObjectStore) -> None:
        arrays = await asyncio.gather(*(store.get(image.media) for image in event.pictures))
        items = [
            (np.asarray(array), caption(image.prompt, image.score))
            for array, image in zip(arrays, event.pictures, strict=True)
        ]
        grid = await asyncio.to_thread(image_grid, items)
        await self.may_save.wait()
        await asyncio.to_thread(self._save, grid, kind, version)

    def _save(self, grid: Image, kind: str, version: int) -> None:
        grid.save(self._run.samples / f"{kind}-{version:06d}.png")
        if self._mlflow:
            self._mlflow.log_image(grid, kind, version)
