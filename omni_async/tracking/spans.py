"""A run's spans: on disk, where they may be as many as they like, and in memory only those of the recent past.

`spans.jsonl` grows as they come, so a run that is killed leaves them too; a run that ends turns them into its timeline and removes it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from omni_async.types import Span


class SpanLog:
    """`keep_s`: how long before the newest span's end one is kept in memory, without its arguments."""

    def __init__(self, path: Path, keep_s: float) -> None:
        self._path = path
        self._keep_s = keep_s
        self._recent: deque[Span] = deque()
        self._encoder = msgspec.json.Encoder(enc_hook=str)
        path.unlink(missing_ok=True)

    def add(self, spans: Sequence[Span]) -> None:
        if not spans:
            return
        with self._path.open("ab") as file:
            file.write(self._encoder.encode_lines(spans))
        self._recent.extend(Span(span.actor, span.kind, span.start, span.end) for span in spans)
        newest = max(span.end for span in spans)
        while self._recent and self._recent[0].end < newest - self._keep_s:
            self._recent.popleft()

    def recent(self, since: float) -> list[Span]:
        """Those that end after `since`, as far back as they are kept, and without their arguments."""
        return [span for span in self._recent if span.end >= since]

    def all(self) -> list[Span]:
        """Every one, in the order they came; but those whose line was cut off."""
        if not self._path.exists():
            return []
        spans: list[Span] = []
        with self._path.open("rb") as file:
            for line in file:
                with contextlib.suppress(msgspec.DecodeError):
                    spans.append(msgspec.json.decode(line, type=Span))
        return spans

    def close(self) -> None:
        """They are in the timeline now."""
        self._path.unlink(missing_ok=True)
