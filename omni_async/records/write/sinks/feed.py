"""Feeds sinks, each from its own thread, so that training never waits for a database or a server.

Metrics of several updates may go in one call (`Sink.gathers_s`). If a tracker does not answer, its writes wait: up to
1,000, in order, retried until it answers or the run ends. A write that the tracker refuses is left out. Each of these
events logs one warning, and a last warning has the number of writes that the tracker lacks. Tracking never ends a run,
and the run folder has everything.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omni_async.config.redact import redact
from omni_async.records.write.sinks.base import Ended, Numbers, Sink

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

_MAX_WAITING = 1000
# Seconds before a write is retried: doubled each time, up to the longest. Once the run is over, always the first.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
# If a tracker is down when the run ends, it has this long to recover.
_LAST_CHANCE_S = 10.0
# After this many refused writes in a row, a tracker gets no more.
_MAX_REFUSED = 20

Write = Callable[[Sink], None]
Waiting = Numbers | Write


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
        """The lines for the console when the run begins."""
        return [feed.sink.live for feed in self._feeds if feed.sink.live]

    def begin(self, version: int) -> None:
        """Mark the run as running before anything is logged, and again when it returns to `version`."""
        for feed in self._feeds:
            feed.begun = True
        self._put(lambda sink: sink.begin(version))

    def metrics(self, numbers: dict[str, float], step: int) -> None:
        row = Numbers(dict(numbers), step, time.time())  # trackers show the real time, whatever clock the run has
        for feed in self._feeds:
            feed.put(row)

    def image(self, image: Image, kind: str, step: int) -> None:
        self._put(lambda sink: sink.image(image, kind, step))

    def media(self, path: Path, kind: str, step: int) -> None:
        self._put(lambda sink: sink.media(path, kind, step))

    def remark(self, name: str, text: str, step: int) -> None:
        self._put(lambda sink: sink.remark(name, text, step))

    def artifact(self, path: Path) -> None:
        """Record a file, with its content when the thread reads it."""
        self._put(lambda sink: sink.artifact(path))

    def finish(self, status: Ended, timeout_s: float = 60.0) -> None:
        """Send the waiting writes, then end the run in each sink that began it.

        Abandons a sink, with a warning, after `timeout_s`, and sooner if its tracker does not answer."""
        for feed in self._feeds:
            feed.close(status, timeout_s)
        for feed in self._feeds:
            feed.join()

    def _put(self, write: Write) -> None:
        for feed in self._feeds:
            feed.put(write)


class _Feed:
    """The waiting writes of one sink, and the thread that sends them in order."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.begun = False
        self._waiting: deque[Waiting] = deque()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._deadline = float("inf")  # of the last write, on the monotonic clock
        self._status: Ended | None = None
        self._down = False
        self._why = ""  # the last failure, while the tracker is down or refuses
        self._refused = 0  # in a row
        self._lacking = 0
        self._alone = 0  # rows of metrics that are not combined
        self._ended = False
        self._thread = threading.Thread(target=self._work, name=sink.label, daemon=True)
        self._thread.start()

    @property
    def _gets_no_more(self) -> bool:
        return self._refused >= _MAX_REFUSED

    def put(self, write: Waiting) -> None:
        with self._changed:
            if self._gets_no_more or len(self._waiting) >= _MAX_WAITING:
                if not self._lacking:
                    self._warn(f"{_MAX_WAITING:,} writes wait, and later ones are left out", self._why)
                self._lacking += 1
                return
            self._waiting.append(write)
            self._changed.notify()

    def close(self, status: Ended, timeout_s: float) -> None:
        with self._changed:
            self._status = status if self.begun else None
            self._deadline = time.monotonic() + (min(timeout_s, _LAST_CHANCE_S) if self._down else timeout_s)
            self._closing.set()
            self._changed.notify()

    def join(self) -> None:
        self._thread.join(max(0.0, self._deadline - time.monotonic()))
        with self._changed:
            lacking = self._lacking + len(self._waiting)
            why = self._why or ("it is still writing" if self._thread.is_alive() else "")
            if lacking:
                self._warn(f"it lacks {lacking:,} write{'s' * (lacking != 1)} of this run", why)
            if not self._ended:
                self._warn("it has no record of the run's end", why)

    def _work(self) -> None:
        while (found := self._next()) is not None:
            write, number = found
            if not self._send(write, number):
                break  # the end of the run is worth a last try
            if self._alone and number > 1:
                continue  # refused together, they are sent one by one
            with self._changed:
                self._alone = max(0, self._alone - number)
                for _ in range(number):
                    self._waiting.popleft()
                if self._gets_no_more:
                    self._lacking += len(self._waiting)
                    self._waiting.clear()
        self._ended = self._send(lambda sink: sink.finish(self._status), 1)

    def _next(self) -> tuple[Write, int] | None:
        """Wait for a write, or for rows of metrics to combine; return the write and how many it combines.

        They stay first in line until they are sent. None: the run is over and no write waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing.is_set())
            if not self._waiting:
                return None
            first = self._waiting[0]
            if not isinstance(first, Numbers):
                return first, 1
            if self._alone or not self.sink.gathers_s:
                return (lambda sink: sink.metrics([first])), 1
            # Another write ends the wait: the grid of an update follows its numbers.
            self._changed.wait_for(
                lambda: self._closing.is_set() or len(self._rows()) < len(self._waiting), self.sink.gathers_s
            )
            rows = self._rows()
            return (lambda sink: sink.metrics(rows)), len(rows)

    def _rows(self) -> list[Numbers]:
        """Return the metrics that are first in line, without other writes between them."""
        rows = list[Numbers]()
        for one in self._waiting:
            if not isinstance(one, Numbers):
                break
            rows.append(one)
        return rows

    def _send(self, write: Write, number: int) -> bool:
        """Send a write that combines `number`, retrying while the tracker does not answer.

        Returns False once the time is up."""
        pause = _FIRST_PAUSE_S
        while True:
            try:
                write(self.sink)
            except Exception as error:  # noqa: BLE001 (trackers raise anything: sqlalchemy's, requests', OSError)
                self._why = _one_line(error)
                if self.sink.refuses(error):
                    self._answered()
                    if number > 1:
                        self._alone = number
                    else:
                        self._leave_out()
                    return True
                self._refused = 0
                if not self._down:
                    self._down = True
                    self._warn("it does not answer; writes wait until it does", self._why)
                if not self._wait(pause):
                    return False
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                self._answered()
                self._why, self._refused = "", 0
                return True

    def _answered(self) -> None:
        if self._down:
            self._down = False
            logger.warning("%s answers again; %d writes are sent now", self.sink.label, len(self._waiting))

    def _leave_out(self) -> None:
        self._refused += 1
        with self._changed:
            self._lacking += 1
        if self._refused == 1:
            self._warn("it refused a write, which is left out", self._why)
        if self._gets_no_more:
            self._warn(f"it refused {_MAX_REFUSED} writes in a row and gets no more", self._why)

    def _wait(self, pause: float) -> bool:
        """Wait before a write is retried, at most until the run is over. Return False once the time is up."""
        if self._closing.wait(pause):
            time.sleep(max(0.0, min(_FIRST_PAUSE_S, self._deadline - time.monotonic())))
        return time.monotonic() < self._deadline

    def _warn(self, what: str, why: str) -> None:
        reason = f" ({why})" if why else ""
        logger.warning("%s: %s%s; the run continues, and its folder has everything", self.sink.label, what, reason)


def _one_line(error: Exception) -> str:
    return redact(f"{type(error).__name__}: {error}").strip().partition("\n")[0]
