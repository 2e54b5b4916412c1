"""Replaces a sink whose tracker is down when a run resumes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omni_async.records.write.sinks.base import Ended, Numbers, Sink, SinkUnusableError

if TYPE_CHECKING:
    from PIL.Image import Image


class LateSink(Sink):
    """A sink that its first write opens; writes fail until the tracker answers.

    Args:
        label: the sink's label.
        open_sink: constructs the sink; raises SinkUnusableError."""

    def __init__(self, label: str, open_sink: Callable[[], Sink]) -> None:
        self.label = label
        self._open = open_sink
        self._sink: Sink | None = None

    def _opened(self) -> Sink:
        if self._sink is None:
            self._sink = self._open()
        return self._sink

    def begin(self, version: int) -> None:
        self._opened().begin(version)

    @property
    def gathers_s(self) -> float:
        return 0.0 if self._sink is None else self._sink.gathers_s

    def metrics(self, rows: Sequence[Numbers]) -> None:
        self._opened().metrics(rows)

    def image(self, image: Image, kind: str, step: int) -> None:
        self._opened().image(image, kind, step)

    def media(self, path: Path, kind: str, step: int) -> None:
        self._opened().media(path, kind, step)

    def remark(self, name: str, text: str, step: int) -> None:
        self._opened().remark(name, text, step)

    def artifact(self, path: Path) -> None:
        self._opened().artifact(path)

    def finish(self, status: Ended | None) -> None:
        if self._sink is not None or status is not None:
            self._opened().finish(status)

    def refuses(self, error: Exception) -> bool:
        if isinstance(error, SinkUnusableError):
            return not error.down
        return super().refuses(error) if self._sink is None else self._sink.refuses(error)

    @property
    def live(self) -> str:
        return "" if self._sink is None else self._sink.live

    @property
    def where(self) -> str:
        return "" if self._sink is None else self._sink.where
