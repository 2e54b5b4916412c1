"""Converts spans to a Chrome/Perfetto trace, and to the fractions of time that each role was busy.

Pure functions over finished spans, and over sets of time: sorted, disjoint half-open intervals.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from omni_async.config.decoding import decode_json
from omni_async.config.reading import read_file
from omni_async.config.role_table import WORKING
from omni_async.config.writing import write_atomic
from omni_async.types import Span, Time, Value
from omni_async.worker import Worker

Interval = tuple[float, float]

WAITS = ("backpressured", "starved")
# A timeline is read as a whole: some 250,000 spans.
_LARGEST_FILE = 2**26  # bytes
_MOST_VALUES = 3_000_000
_NOT_BUSY = (*WAITS, "outage")


def trace_events(spans: Sequence[Span]) -> dict[str, Any]:
    """Return Chrome's JSON object: a process per actor, its overlapping spans on numbered lanes (threads).

    Times are whole microseconds since the earliest span, which began at `otherData.origin_s` seconds since the epoch.
    Lanes are assigned by the rounded times, so complete events (`ph: X`) of one lane never overlap, which Perfetto
    would otherwise drop or nest."""
    origin = min((span.start for span in spans), default=0.0)
    per_actor: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        per_actor[span.actor].append(span)
    events: list[dict[str, Any]] = []
    for pid, actor in enumerate(sorted(per_actor), start=1):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": actor}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
        complete, num_lanes = _lanes(per_actor[actor], pid, origin)
        for lane in range(num_lanes):
            label = actor if lane == 0 else f"{actor} #{lane + 1}"
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": lane, "args": {"name": label}})
        events += complete
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"origin_s": origin}}


def _lanes(spans: Iterable[Span], pid: int, origin: float) -> tuple[list[dict[str, Any]], int]:
    """Put each span on the lowest lane that is free when it starts; the number of lanes is the maximum overlap."""
    complete: list[dict[str, Any]] = []
    running: list[tuple[int, int]] = []  # (end, lane)
    free: list[int] = []
    num_lanes = 0
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        start = round((span.start - origin) * 1e6)
        end = max(start, round((span.end - origin) * 1e6))  # a clock set back must not spoil the file
        while running and running[0][0] <= start:
            heapq.heappush(free, heapq.heappop(running)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, num_lanes = num_lanes, num_lanes + 1
        heapq.heappush(running, (end, lane))
        event = {"ph": "X", "name": span.kind, "cat": Worker.parse(span.actor).role, "pid": pid, "tid": lane}
        complete.append({**event, "ts": start, "dur": end - start, "args": span.args})
    return complete, num_lanes


def write_trace(path: Path, spans: Sequence[Span]) -> None:
    """Write `trace_events` as JSON, atomically. Arguments without a JSON form are written as their `str`."""
    write_atomic(path, msgspec.json.encode(trace_events(spans), enc_hook=str))


class _Event(msgspec.Struct, frozen=True, gc=False):
    ph: str
    name: str
    pid: int
    ts: Value = 0.0
    dur: Value = 0.0
    args: dict[str, Any] = {}


class _Origin(msgspec.Struct, frozen=True):
    origin_s: Time


class _Trace(msgspec.Struct, frozen=True):
    traceEvents: list[_Event]
    otherData: _Origin


def read_trace(path: Path) -> list[Span]:
    """Read every span of a run from a file written by `write_trace`, to the microsecond.

    Raises OSError, or ValueError if it is not such a file or too large for memory."""
    trace: _Trace = decode_json(read_file(path, _LARGEST_FILE, within=path.parent), _Trace, _MOST_VALUES)
    origin = trace.otherData.origin_s
    actors = {event.pid: str(event.args.get("name")) for event in trace.traceEvents if event.name == "process_name"}
    kinds: dict[str, str] = {}  # a million spans share the few texts of their kinds
    spans = []
    for event in trace.traceEvents:
        if event.ph == "X" and event.pid in actors:
            start = origin + event.ts / 1e6
            kind = kinds.setdefault(event.name, event.name)
            spans.append(Span(actors[event.pid], kind, start, start + event.dur / 1e6, event.args))
    return spans


def _times(spans: Iterable[Span], start: float, end: float, kinds: tuple[str, ...] | None) -> list[Interval]:
    """Return the times inside [start, end) of spans of these kinds (None: every kind of work)."""
    chosen = ((s.start, s.end) for s in spans if (s.kind not in _NOT_BUSY if kinds is None else s.kind in kinds))
    return clip(union(chosen), start, end)


def busy_fractions(spans: Sequence[Span], start: float, end: float) -> dict[str, dict[str, float]]:
    """Return, per role, the mean fractions of [start, end) its actors were `busy`, `backpressured` and `starved`.

    An actor's overlapping spans count once. The three exclude each other in this order: an engine that generates eight
    samples while a ninth slot waits for a prompt is busy. The rest up to 1 is time without records, or a scorer's
    outage.

    Args:
        spans: of all actors, in any order; a worker and its replacement count as one actor.
        start, end: seconds of the spans' clock."""
    per_actor: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        per_actor[Worker.parse(span.actor).slot].append(span)  # a replacement has the same slot
    per_role: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    wall = end - start
    for actor, own in per_actor.items():
        busy = _times(own, start, end, None)
        blocked = union([*busy, *_times(own, start, end, ("backpressured",))])
        waiting = union([*blocked, *_times(own, start, end, ("starved",))])
        seconds = [length(times) for times in (busy, blocked, waiting)]
        shares = [amount / wall if wall > 0 else 0.0 for amount in seconds]
        per_role[Worker.parse(actor).role].append((shares[0], shares[1] - shares[0], shares[2] - shares[1]))
    names = ("busy", "backpressured", "starved")
    means = {role: [sum(column) / len(rows) for column in zip(*rows, strict=True)] for role, rows in per_role.items()}
    return {role: dict(zip(names, shares, strict=True)) for role, shares in sorted(means.items())}


def overlap_fraction(spans: Sequence[Span], start: float, end: float) -> float:
    """Return the fraction of [start, end) during which at least two of rollout, reward and trainer were busy.

    Args:
        spans, start, end: as for `busy_fractions`."""
    if end <= start:
        return 0.0
    per_role = ([span for span in spans if Worker.parse(span.actor).role == role] for role in WORKING)
    return length(at_least(2, (_times(own, start, end, None) for own in per_role))) / (end - start)


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
