"""Writes spans as a Chrome/Perfetto trace, and computes with sets of time.

Sets of time are sorted, disjoint half-open intervals.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from omni_async.config.writing import replacing
from omni_async.types import Span
from omni_async.worker import Worker

Interval = tuple[float, float]

_BUFFER = 2**20


class _Lanes:
    """The lanes (threads) of an actor's process. Spans that overlap are on different lanes.

    If spans come in the order of their ends, the number of lanes is the maximum overlap."""

    def __init__(self, actor: str, pid: int) -> None:
        self._pid, self._role = pid, Worker.parse(actor).role
        self.number = 0
        self._ends: list[tuple[int, int]] = []  # (end of its last span, lane), sorted

    def event(self, span: Span, origin: float) -> dict[str, Any]:
        """Return the event of a span, on the lane that has been free for the shortest time when it starts."""
        start = round((span.start - origin) * 1e6)
        end = max(start, round((span.end - origin) * 1e6))  # a clock set back must not spoil the file
        if place := bisect_right(self._ends, (start, self.number)):
            _, lane = self._ends.pop(place - 1)
        else:
            lane, self.number = self.number, self.number + 1
        insort(self._ends, (end, lane))
        event = {"ph": "X", "name": span.kind, "cat": self._role, "pid": self._pid, "tid": lane}
        return {**event, "ts": start, "dur": end - start, "args": span.args}


def trace_events(spans: Iterable[Span], origin: float, actors: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield Chrome's events: a process per actor, the spans in their order, then the names of the lanes.

    Lanes are assigned by rounded times, so complete events (`ph: X`) of one lane never overlap, which Perfetto would
    otherwise drop or nest.

    Args:
        spans: those of an actor in the order of their ends.
        origin: the earliest start, in seconds of the spans' clock; times are whole microseconds since then.
        actors: of all spans."""
    lanes = {actor: _Lanes(actor, pid) for pid, actor in enumerate(sorted(actors), start=1)}
    for pid, actor in enumerate(lanes, start=1):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": actor}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for span in spans:
        yield lanes[span.actor].event(span, origin)
    for pid, (actor, own) in enumerate(lanes.items(), start=1):
        for lane in range(own.number):
            label = actor if lane == 0 else f"{actor} #{lane + 1}"
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": lane, "args": {"name": label}}


def write_trace(path: Path, spans: Iterable[Span]) -> None:
    """Write `trace_events` as Chrome's JSON object, atomically, an event at a time.

    The first began at `otherData.origin_s` seconds since the epoch. Arguments without a JSON form become their `str`.

    Args:
        path: the file.
        spans: iterated twice, so not an iterator; those of an actor in the order of their ends."""
    origin, actors = math.inf, set[str]()
    for span in spans:
        origin = min(origin, span.start)
        actors.add(span.actor)
    origin = origin if actors else 0.0
    encoder = msgspec.json.Encoder(enc_hook=str)
    with replacing(path) as unfinished, unfinished.open("wb", _BUFFER) as file:
        file.write(b'{"traceEvents":[')
        for number, event in enumerate(trace_events(spans, origin, actors)):
            file.write(b"," * (number > 0) + encoder.encode(event))
        rest = {"displayTimeUnit": "ms", "otherData": {"origin_s": origin}}
        file.write(b"]," + encoder.encode(rest)[1:])


# ---- sets of time ----------------------------------------------------------------------------------------------------


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same points as sorted disjoint intervals; empty and reversed intervals vanish."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def clip(intervals: Iterable[Interval], start: float, end: float) -> list[Interval]:
    """Return the parts of intervals inside [start, end); intervals outside it vanish.

    Args:
        intervals: (start, end) pairs in any order, which is kept; they may overlap.
        start, end: in the same unit."""
    return [(max(a, start), min(b, end)) for a, b in intervals if max(a, start) < min(b, end)]


def length(disjoint: Iterable[Interval]) -> float:
    return sum(end - start for start, end in disjoint)


def at_least(count: int, sets: Iterable[Iterable[Interval]]) -> list[Interval]:
    """Return the times covered by at least `count` sets; each set is united first, so its own overlaps count once."""
    edges = sorted(edge for members in sets for start, end in union(members) for edge in ((start, 1), (end, -1)))
    result: list[Interval] = []
    depth, opened = 0, 0.0
    for time, step in edges:
        if step > 0 and depth + 1 == count:
            opened = time
        elif step < 0 and depth == count and opened < time:
            result.append((opened, time))
        depth += step
    return union(result)
