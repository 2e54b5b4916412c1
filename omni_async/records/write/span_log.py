"""Keeps the spans of a run on disk; memory only holds the recent past.

`spans.jsonl` grows as spans arrive, so a killed run leaves them too. A run that ends converts them into its timeline
and removes the file.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from omni_async.config.writing import append
from omni_async.records.write.files import decode_line, lines_of
from omni_async.records.write.rundir import refusing
from omni_async.types import Span


class SpanLog:
    """The spans of a run, iterated in the order of arrival; spans whose line is incomplete are left out.

    `keep_s`: how long before the newest span's end a span stays in memory, without its arguments. `held`: the file is
    not touched until `begin_file`, because it is an earlier attempt's until a resumed run has an update."""

    def __init__(self, path: Path, keep_s: float, held: bool = False) -> None:
        self._path = path
        self._keep_s = keep_s
        self._recent: deque[Span] = deque()
        self._encoder = msgspec.json.Encoder(enc_hook=str)
        self._held: list[Span] | None = []
        self._length = 0
        if not held:
            self.begin_file()

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Span]:
        return self._from(0)

    def begin_file(self) -> None:
        """Start a new file with the spans that were held. Raises RunDirectoryError if that fails."""
        held, self._held = self._held, None
        with refusing(f"cannot begin {self._path} anew"):
            self._path.unlink(missing_ok=True)
        self._write(held or ())

    def _write(self, spans: Sequence[Span]) -> None:
        if spans:
            with refusing(f"cannot append to {self._path}"):
                append(self._path, self._encoder.encode_lines(spans))

    def add(self, spans: Sequence[Span]) -> None:
        """Add spans. Raises RunDirectoryError if they cannot be written."""
        if not spans:
            return
        if self._held is None:
            self._write(spans)
        else:
            self._held += spans
        self._length += len(spans)
        self._recent.extend(Span(span.actor, span.kind, span.start, span.end) for span in spans)
        newest = max(span.end for span in spans)
        while self._recent and self._recent[0].end < newest - self._keep_s:
            self._recent.popleft()

    def recent(self, since: float) -> list[Span]:
        """Return spans that end after `since`, without their arguments; older ones are no longer in memory."""
        return [span for span in self._recent if span.end >= since]

    def newest(self, most: int) -> list[Span]:
        """Return the last `most` spans, in the order of arrival."""
        return [*self._from(max(0, self._length - most))]

    def _from(self, first: int) -> Iterator[Span]:
        if self._held is not None:
            yield from islice(self._held, first, None)
            return
        decoder = msgspec.json.Decoder(Span)
        for line in islice(lines_of(self._path), first, None):
            with contextlib.suppress(ValueError, RecursionError):
                yield decode_line(line, decoder)

    def give_room(self, most: int) -> None:
        """Remove the file to make room on a full disk; up to `most` of its newest spans stay, in memory."""
        newest = self.newest(most)
        self.remove_file()
        self._held, self._length = newest, len(newest)

    def remove_file(self) -> None:
        """Remove the file, once its spans are in the timeline."""
        if self._held is None:
            self._path.unlink(missing_ok=True)
