"""Feeds sinks, each from a thread of its own, so that training never waits for a database or a server.

A sink that fails, or that is too far behind, is one warning, and nothing more is sent to it: tracking must not end a
run, and everything is in the run folder as well. Its run is still ended there, if that can be done.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omni_async.config.redact import redact
from omni_async.tracking.sinks.base import Ended, Sink

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

_MAX_QUEUED = 1000


class Sinks:
    """All sinks of a run. Calls return at once; they come from one thread, `finish` last."""

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._feeds = [_Feed(sink) for sink in sinks]

    @property
    def where(self) -> list[tuple[str, str]]:
        """The label of each sink, and how to look at the run there."""
        return [(feed.sink.label, feed.sink.where) for feed in self._feeds if feed.sink.where]

    @property
    def live(self) -> list[str]:
        """What the console says when the run begins."""
        return [feed.sink.live for feed in self._feeds if feed.sink.live]

    def begin(self, version: int) -> None:
        """Set the run going before anything is logged, and again where it goes back to `version`."""
        for feed in self._feeds:
            feed.begun = True
        self._put(lambda sink: sink.begin(version))

    def metrics(self, numbers: dict[str, float], step: int) -> None:
        copy, now = dict(numbers), time.time()  # trackers show the real time, whatever clock the run has
        self._put(lambda sink: sink.metrics(copy, step, now))

    def image(self, image: Image, kind: str, step: int) -> None:
        self._put(lambda sink: sink.image(image, kind, step))

    def media(self, path: Path, kind: str, step: int) -> None:
        self._put(lambda sink: sink.media(path, kind, step))

    def remark(self, name: str, text: str, step: int) -> None:
        self._put(lambda sink: sink.remark(name, text, step))

    def artifact(self, path: Path) -> None:
        """Record a file, as it is when the thread comes to it."""
        self._put(lambda sink: sink.artifact(path))

    def finish(self, status: Ended, timeout_s: float = 60.0) -> None:
        """Send what is queued, then end the run in each sink where it began.

        Gives a sink up, with a warning, after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        for feed in self._feeds:
            feed.close(status, deadline)
        for feed in self._feeds:
            feed.join(deadline)

    def _put(self, send: Callable[[Sink], None]) -> None:
        for feed in self._feeds:
            feed.put(send)


class _Feed:
    """The queue and the thread of one sink."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.begun = False
        self._status: Ended | None = None
        self._failed = False
        self._queue: queue.Queue[Callable[[Sink], None] | None] = queue.Queue(maxsize=_MAX_QUEUED)
        self._thread = threading.Thread(target=self._work, name=sink.label, daemon=True)
        self._thread.start()

    def put(self, send: Callable[[Sink], None]) -> None:
        if self._failed:
            return
        try:
            self._queue.put_nowait(send)
        except queue.Full:
            self._fail(f"{_MAX_QUEUED} writes behind")

    def close(self, status: Ended, deadline: float) -> None:
        self._status = status if self.begun else None
        try:
            self._queue.put(None, timeout=max(0.0, deadline - time.monotonic()))
        except queue.Full:
            self._fail("it accepts nothing any more")

    def join(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._fail("it is still writing")

    def _work(self) -> None:
        while (send := self._queue.get()) is not None:
            if not self._failed:
                self._try(send)
        self._try(lambda sink: sink.finish(self._status))

    def _try(self, send: Callable[[Sink], None]) -> None:
        try:
            send(self.sink)
        except Exception as error:  # noqa: BLE001 (trackers raise anything: sqlalchemy's, requests', OSError)
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            message = redact(reason).strip().partition("\n")[0]
            logger.warning(
                "%s logging stops here (%s); the run goes on and its folder has everything", self.sink.label, message
            )
