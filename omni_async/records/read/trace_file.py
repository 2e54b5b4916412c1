"""Reads the spans of `trace.json` a block at a time: decoded as one JSON value they would fill gigabytes.

The file is one line, written by `records.write.timeline.write_trace`. No text in it contains an unescaped quotation
mark, so the beginning of an event can be found without decoding the bytes before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from omni_async.config.reading import open_file
from omni_async.records.read.spans import Facts, Placed, SpanLine
from omni_async.records.write.files import decode_line
from omni_async.types import Value

_BLOCK = 2**18
_LONGEST = 2**24  # bytes of an event
_BETWEEN = b',{"ph":"'
_ORIGIN = re.compile(rb'"otherData":\{"origin_s":(-?[0-9.eE+-]+)\}\}\s*\Z')
_FIRST = b'{"traceEvents":['


class NotATrace(ValueError):
    """The file is not a timeline as runs write it."""


class _Name(msgspec.Struct):
    name: str = ""


class _Event(msgspec.Struct, gc=False):
    ph: str
    name: str
    pid: int
    ts: Value = 0
    dur: Value = 0
    args: Facts = msgspec.field(default_factory=Facts)


class TraceEvent(msgspec.Struct):
    """A span with all its data in the timeline."""

    name: str
    dur: Value
    args: dict[str, Any]


class _Process(msgspec.Struct):
    args: _Name


def trace_spans(path: Path) -> Iterator[list[Placed]]:
    """Yield the spans, some thousand at a time; those of a worker are in the order of their starts.

    Raises NotATrace, one line, if no run wrote the file; OSError if it is unreadable, or leads out of its folder."""
    with open_file(path, within=path.parent) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 4096))
        found = _ORIGIN.search(file.read())
        file.seek(0)
        if found is None or file.read(len(_FIRST)) != _FIRST:
            raise NotATrace(f"{path} is no timeline that a run wrote")
        try:
            origin = float(found[1])
        except ValueError:
            raise NotATrace(f"{path} is no timeline that a run wrote") from None
        actors: dict[int, str] = {}
        decoder, names = msgspec.json.Decoder(_Event), msgspec.json.Decoder(_Process)
        offset, rest = len(_FIRST), b""
        while content := file.read(_BLOCK):
            if len(rest) > _LONGEST:
                raise NotATrace(f"{path} has an event that no run writes")
            *events, rest = (rest + content).split(_BETWEEN)
            placed: list[Placed] = []
            offset = _take(events, offset, placed, actors, origin, decoder, names)
            yield placed
        last = rest[: rest.rindex(b'],"displayTimeUnit"')] if b'],"displayTimeUnit"' in rest else b""
        placed = []
        _take([last] if last else [], offset, placed, actors, origin, decoder, names)
        yield placed


def _take(
    events: list[bytes],
    offset: int,
    placed: list[Placed],
    actors: dict[int, str],
    origin: float,
    decoder: msgspec.json.Decoder[_Event],
    names: msgspec.json.Decoder[_Process],
) -> int:
    """Decode events and return where the next begins. All but the file's first event lack the separator's bytes."""
    for text in events:
        whole = text if text.startswith(b'{"ph":"') else _BETWEEN[1:] + text
        try:
            event = decode_line(whole, decoder)
            if event.ph == "X":
                start = origin + event.ts / 1e6
                line = SpanLine(actors[event.pid], event.name, start, start + event.dur / 1e6, event.args)
                placed.append(Placed(line, offset, len(whole)))
            elif event.name == "process_name":
                actors[event.pid] = names.decode(whole).args.name
        except (ValueError, OverflowError, RecursionError, KeyError) as error:
            raise NotATrace(f"an event of the timeline cannot be read: {error}") from None
        offset += len(whole) + 1
    return offset
