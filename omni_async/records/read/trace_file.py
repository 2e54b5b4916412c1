"""Reads the spans of `trace.json` a block at a time: decoded as one JSON value they would fill gigabytes.

The file is one line, written by `records.write.timeline.write_trace`. No text in it contains an unescaped quotation
mark, so the beginning of an event can be found without decoding the bytes before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from omni_async.config.reading import open_file
from omni_async.records.read.spans import Facts, Placed, ReadSpan, SpanLine
from omni_async.records.write.files import decode_line
from omni_async.types import Span, Value

A = TypeVar("A")

_BLOCK = 2**18
_LONGEST = 2**24  # bytes of an event
_BETWEEN = b',{"ph":"'
_ORIGIN = re.compile(rb'"otherData":\{"origin_s":(-?[0-9.eE+-]+)\}\}\s*\Z')
_FIRST = b'{"traceEvents":['
_LAST = b'],"displayTimeUnit"'


class NotATrace(ValueError):
    """The file is not a timeline as runs write it."""


class _Name(msgspec.Struct):
    name: str = ""


class _Event(msgspec.Struct, Generic[A], gc=False):
    ph: str
    name: str
    pid: int
    args: A
    ts: Value = 0
    dur: Value = 0


class TraceEvent(msgspec.Struct):
    """A span with all its data in the timeline."""

    name: str
    dur: Value
    args: dict[str, Any]


class _Process(msgspec.Struct):
    args: _Name


class _Found(NamedTuple, Generic[A]):
    """A span, as the numbers and names in the file mean it, and its place there."""

    actor: str
    kind: str
    start: float
    end: float
    args: A
    offset: int
    size: int


def read_trace(path: Path) -> Iterator[Span]:
    """Yield the spans of a run, to the microsecond. Raises the errors of `trace_spans`."""
    for found in _blocks(path, msgspec.json.Decoder(_Event[dict[str, Any]])):
        for actor, kind, start, end, args, _, _ in found:
            yield Span(actor, kind, start, end, args)


def raw_spans(path: Path) -> Iterator[ReadSpan]:
    """Yield the spans of a run without decoding their arguments. Raises the errors of `trace_spans`."""
    for found in _blocks(path, msgspec.json.Decoder(_Event[msgspec.Raw])):
        for one in found:
            yield ReadSpan(*one[:5])


def trace_spans(path: Path) -> Iterator[list[Placed]]:
    """Yield the spans, some thousand at a time; those of a worker are in the order of their ends, or of their starts.

    Raises NotATrace, one line, if no run wrote the file; OSError if it is unreadable, or leads out of its folder."""
    for found in _blocks(path, msgspec.json.Decoder(_Event[Facts])):
        yield [Placed(SpanLine(*one[:5]), one.offset, one.size) for one in found]


def _blocks(path: Path, decoder: msgspec.json.Decoder[_Event[A]]) -> Iterator[list[_Found[A]]]:
    with open_file(path, within=path.parent) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 4096))
        found = _ORIGIN.search(file.read())
        file.seek(0)
        if found is None or file.read(len(_FIRST)) != _FIRST:
            raise NotATrace(f"{path} is no timeline that a run wrote")
        try:
            events = _Events(float(found[1]), decoder, len(_FIRST))
        except ValueError:
            raise NotATrace(f"{path} is no timeline that a run wrote") from None
        rest = b""
        while content := file.read(_BLOCK):
            if len(rest) > _LONGEST:
                raise NotATrace(f"{path} has an event that no run writes")
            *texts, rest = (rest + content).split(_BETWEEN)
            yield [*events.take(texts)]
        last = rest[: rest.rindex(_LAST)] if _LAST in rest else b""
        yield [*events.take([last] if last else [])]


class _Events(Generic[A]):
    """Decodes events, in the order of the file from `offset` on."""

    def __init__(self, origin: float, decoder: msgspec.json.Decoder[_Event[A]], offset: int) -> None:
        self._origin, self._decoder, self._offset = origin, decoder, offset
        self._names = msgspec.json.Decoder(_Process)
        self._actors: dict[int, str] = {}

    def take(self, texts: list[bytes]) -> Iterator[_Found[A]]:
        """Yield the spans of events. All but the file's first event lack the separator's bytes."""
        for text in texts:
            whole = text if text.startswith(b'{"ph":"') else _BETWEEN[1:] + text
            try:
                event = decode_line(whole, self._decoder)
                if event.ph == "X":
                    start = self._origin + event.ts / 1e6
                    end = start + event.dur / 1e6
                    yield _Found(self._actors[event.pid], event.name, start, end, event.args, self._offset, len(whole))
                elif event.name == "process_name":
                    self._actors[event.pid] = self._names.decode(whole).args.name
            except (ValueError, OverflowError, RecursionError, KeyError) as error:
                raise NotATrace(f"an event of the timeline cannot be read: {error}") from None
            self._offset += len(whole) + 1
