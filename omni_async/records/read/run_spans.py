"""Reads the spans of a run one by one; the memory does not grow with their number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from omni_async.records.read.spans import ReadSpan, is_in_time
from omni_async.records.read.trace_file import raw_spans
from omni_async.records.write.files import decode_line, lines_of
from omni_async.records.write.rundir import RunDirectory
from omni_async.worker import Worker

# Maxima of workers, and of names of workers and their replacements, that a page shows.
_MOST_SLOTS = 1000
_MOST_ACTORS = 10 * _MOST_SLOTS
_LONGEST_NAME = 200


def spans_of(path: Path, run: RunDirectory, left_out: dict[str, str]) -> Iterator[ReadSpan]:
    """Yield the spans in a file, those of the first 1,000 workers.

    Args:
        path: the run's `spans.jsonl` or `trace.json`.
        run: the folder that the file must not lead out of.
        left_out: gets the reason, by the file's name, if spans are missing. Raises no error of the file."""
    lines = _LinesOfSpans(path, run.path)
    found: Iterable[ReadSpan] = lines if path == run.spans else raw_spans(path)
    known: dict[str, bool] = {}
    slots: set[str] = set()
    number = 0
    try:
        for span in found:
            if (shown := known.get(span.actor)) is None:
                slot = Worker.parse(span.actor).slot
                shown = len(span.actor) <= _LONGEST_NAME and (slot in slots or len(slots) < _MOST_SLOTS)
                if shown := shown and len(known) < _MOST_ACTORS:
                    slots.add(slot)
                if len(known) < _MOST_ACTORS:
                    known[span.actor] = shown
            if shown and is_in_time(span):
                yield span
            else:
                number += 1
    except (OSError, ValueError, RecursionError) as error:
        left_out[path.name] = f"cannot be read: {(isinstance(error, OSError) and error.strerror) or error}"
        return
    if lines.damaged:
        count = "1 line" if lines.damaged == 1 else f"{lines.damaged} lines"
        left_out[path.name] = f"{count} cannot be read, the first is line {lines.first}"
    elif number:
        left_out[path.name] = f"{number} spans are of no time, or of more than {_MOST_SLOTS} workers"


class _LinesOfSpans:
    """The spans in a file of lines. A last line that is still being written does not count as damage.

    `damaged`: the number of lines that are no spans. `first`: the first of them, from 1."""

    def __init__(self, path: Path, within: Path) -> None:
        self._path, self._within = path, within
        self.damaged = self.first = 0

    def __iter__(self) -> Iterator[ReadSpan]:
        decoder = msgspec.json.Decoder(ReadSpan)
        for number, line in enumerate(lines_of(self._path, self._within), 1):
            try:
                span = decode_line(line, decoder)
                if is_in_time(span):
                    yield span
                    continue
            except (ValueError, RecursionError):
                pass
            if line.endswith(b"\n"):
                self.first, self.damaged = self.first or number, self.damaged + 1
