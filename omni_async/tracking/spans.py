"""Keeps a run's spans: on disk all of them, in memory only those of the recent past.

`spans.jsonl` grows as they come, so a run that is killed leaves them too; a run that ends turns them into its timeline
and removes the file. A resumed run keeps them in memory until its first update, because the file there is an earlier
attempt's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from omni_async.tracking.files import read_records
from omni_async.tracking.rundir import refusing
from omni_async.types import Span


class SpanLog:
    """The spans of a run.

    `keep_s`: how long before the newest span's end a span is kept in memory, without its arguments. `held`: the file is
    left alone until `open`."""

    def __init__(self, path: Path, keep_s: float, held: bool = False) -> None:
        self._path = path
        self._keep_s = keep_s
        self._recent: deque[Span] = deque()
        self._encoder = msgspec.json.Encoder(enc_hook=str)
        self._held: list[Span] | None = []
        if not held:
            self.open()

    def open(self) -> None:
        """Begin the file anew, with the spans that were held. Raises RunDirectoryError if that can't be done."""
        held, self._held = self._held, None
        with refusing(f"cannot begin {self._path} anew"):
            self._path.unlink(missing_ok=True)
        self._write(held or ())

    def _write(self, spans: Sequence[Span]) -> None:
        if spans:
            with refusing(f"cannot append to {self._path}"), self._path.open("ab") as file:
                file.write(self._encoder.encode_lines(spans))

    def add(self, spans: Sequence[Span]) -> None:
        """Add spans. Raises RunDirectoryError if they cannot be written."""
        if not spans:
            return
        if self._held is None:
            self._write(spans)
        else:
            self._held += spans
        self._recent.extend(Span(span.actor, span.kind, span.start, span.end) for span in spans)
        newest = max(span.end for span in spans)
        while self._recent and self._recent[0].end < newest - self._keep_s:
            self._recent.popleft()

    def recent(self, since: float) -> list[Span]:
        """Return the spans that end after `since`, as far back as they are kept, and without their arguments."""
        return [span for span in self._recent if span.end >= since]

    def all(self) -> list[Span]:
        """Return every span, in the order they came, except those whose line was cut off."""
        return read_records(self._path, Span) if self._held is None else [*self._held]

    def close(self) -> None:
        """Remove the file, when its spans are in the timeline."""
        if self._held is None:
            self._path.unlink(missing_ok=True)
