"""Tests the files of a round of videos with sound: their names, what MLflow gets, and a disk that is full."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_async.aio.clock import ManualClock
from omni_async.control.events import RunEvent, Shown
from omni_async.driver import sample_files
from omni_async.driver.sample_files import SampleFiles
from omni_async.media import Media
from omni_async.store import LocalStore
from omni_async.tracking.rundir import RunDirectory
from omni_async.types import Prompt, Score
from tests.runtime.runtime_world import write_world


class Sink:
    """A sink that remembers what it was given."""

    def __init__(self) -> None:
        self.images: list[tuple[str, int]] = []
        self.artifacts: list[tuple[str, str | None]] = []

    def log_image(self, image: Any, name: str, step: int) -> None:
        self.images.append((name, step))

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        assert path.is_file()
        self.artifacts.append((path.name, folder))


def write_round(folder: Path, count: int) -> tuple[set[str], Sink, list[str]]:
    """Returns the files of an update that shows so many samples, what MLflow got, and the notes."""
    run = RunDirectory.create(write_world(folder), ManualClock(1000.0))
    sink, notes = Sink(), list[str]()
    video = np.zeros((4, 3, 32, 32), np.uint8)
    media = Media(video=video, fps=8, audio=np.zeros((1, 4000), np.float32), sample_rate=8000)

    async def main() -> None:
        files = SampleFiles(run, sink, notes.append)  # type: ignore[arg-type]
        files.may_save.set()
        shown = tuple(Shown(media, Prompt(0, "a cat"), Score(1.0)) for _ in range(count))
        files.draw(RunEvent("update", {"version": 10}, shown), LocalStore())
        await files.finish(30.0, keep=True)

    asyncio.run(main())
    return {path.name for path in run.samples.iterdir()}, sink, notes


def test_a_sample_has_a_tile_a_video_and_a_sound(tmp_path: Path) -> None:
    names, sink, notes = write_round(tmp_path, 2)
    files = [f"train-000010-0{i}.{kind}" for i in range(2) for kind in ("mp4", "wav")]
    assert names == {"train-000010.png", *files} and notes == []
    assert sink.images == [("train", 10)] and sink.artifacts == [(name, "samples") for name in files]


def test_a_full_disk_is_noted_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(media: Media, path: Path) -> list[Path]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sample_files, "write_media", full)
    names, sink, notes = write_round(tmp_path, 2)
    assert names == {"train-000010.png"} and sink.artifacts == []
    assert notes == ["samples of train-000010 were not written: OSError: [Errno 28] No space left on device"]
