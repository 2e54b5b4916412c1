"""Keeps the newest spans of a run in some 50 bytes each, and serves a timeline from them.

A row has the drawn properties of a span: times, worker, kind and group. Everything else stays in the file, at a place
recorded in the row. Times are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from omni_async.config.role_table import WORKING
from omni_async.records.read.rows import Records, Rows
from omni_async.records.write.activity import WAITS
from omni_async.types import FARTHEST_S
from omni_async.worker import Worker

_ROW = np.dtype(
    [
        ("start", "f8"),
        ("end", "f8"),
        ("offset", "i8"),  # of the span in its file
        ("size", "u4"),
        ("actor", "u4"),
        ("group", "i4"),  # -1: no group
        ("track", "u2"),  # overlapping spans of a worker are on different tracks
        ("kind", "u1"),
    ]
)
# Times when a worker was at work, each moment once; or when it waited and did nothing else.
_PIECE = np.dtype([("start", "f8"), ("end", "f8"), ("actor", "u4"), ("waits", "?")])
_CALL = np.dtype([("start", "f8"), ("end", "f8"), ("offset", "i8"), ("size", "u4"), ("actor", "u4"), ("prompt", "i4")])

_MOST_SPANS = 3_000_000  # up to 290 MB
_MOST_KINDS = 255
_LARGEST = 2**31  # exclusive bound on numbers of groups and prompts
# Exceeds any real run; further actors and tracks are merged.
_MOST_ACTORS = 10_000
_MOST_TRACKS = 200
_MOST_PROMPTS = 10_000  # of one call
_LONGEST_NAME = 200
_OTHERS = "others"
# Number of a worker's recent stretches of work; a span that arrives late can only fill gaps between these.
_MOST_STRETCHES = 64


class Facts(msgspec.Struct, gc=False):
    """The arguments of a span that a row needs."""

    sample: Any = None
    group: Any = None
    prompts: Any = ()


class SpanLine(msgspec.Struct, gc=False):
    """The parts of a span in its file that a row needs."""

    actor: str
    kind: str
    start: float
    end: float
    args: Facts = msgspec.field(default_factory=Facts)


class ReadSpan(msgspec.Struct, gc=False):
    """A span whose arguments are not decoded; they refer to the bytes that it was read from."""

    actor: str
    kind: str
    start: float
    end: float
    args: msgspec.Raw = msgspec.Raw(b"{}")


class Placed(NamedTuple):
    """A span, and its place in its file."""

    span: SpanLine
    offset: int
    size: int


class Where(NamedTuple):
    """A span's place in the file, its lane and its worker."""

    start: float
    offset: int
    size: int
    lane: int
    actor: str


class Actor:
    """A worker's lane, and the times already assigned in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.worker = Worker.parse(name)
        self.tracks: list[float] = []  # end of each track's last span
        self.stretches: list[list[float]] = []  # of work, disjoint, in order

    def track_of(self, start: float, end: float) -> int:
        """Return the lowest track that is free from `start` on, and occupy it until `end`."""
        for number, until in enumerate(self.tracks):
            if until <= start:
                self.tracks[number] = max(end, until)
                return number
        if len(self.tracks) < _MOST_TRACKS:
            self.tracks.append(end)
        return len(self.tracks) - 1

    def uncovered(self, start: float, end: float) -> list[tuple[float, float]]:
        """Return the parts of the span not yet covered by work of this worker, and record them as work."""
        parts: list[tuple[float, float]] = []
        stretches, upper = self.stretches, end
        merged_start, merged_end = start, end
        later: list[list[float]] = []
        while stretches and stretches[-1][1] >= start:
            one = stretches.pop()
            if one[0] > end:
                later.append(one)
                continue
            if one[1] < upper:
                parts.append((one[1], upper))
            upper = min(upper, one[0])
            merged_start, merged_end = min(merged_start, one[0]), max(merged_end, one[1])
        if start < upper:
            parts.append((start, upper))
        stretches.append([merged_start, merged_end])
        stretches.extend(reversed(later))
        del stretches[:-_MOST_STRETCHES]
        return parts


class Window(NamedTuple):
    """The events from `start` to `end` on some lanes.

    `boxes`: the spans, if they are few enough. Otherwise `busy` and `waits`, (lanes, columns) of uint8: the share of
    each column's time that the lane's worker worked or waited; 255 is all of it."""

    start: float
    end: float
    first: int
    boxes: Records | None
    busy: npt.NDArray[np.uint8] | None
    waits: npt.NDArray[np.uint8] | None


class SpanStore:
    """The spans of a run. `lanes`: the slots of workers, in the order of roles; a replacement uses its slot's lane."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._rows, self._pieces, self._calls = (Rows(row, _MOST_SPANS) for row in (_ROW, _PIECE, _CALL))
        self._actors: dict[str, int] = {}
        self._known: list[Actor] = []
        self.kinds: list[str] = []
        self._kind_of: dict[str, int] = {}
        self._lanes: list[str] = []
        self._lane_of = np.empty(0, np.int64)
        self.start = self.end = 0.0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def forgotten(self) -> int:
        """Return the number of older spans that are no longer kept."""
        return self._rows.forgotten

    def begin_region(self) -> None:
        """Prepare for spans of another time than before, as when a file's end is read before its beginning."""
        for actor in self._known:
            actor.tracks.clear()
            actor.stretches.clear()

    def add(self, placed: Iterable[Placed]) -> None:
        """Add spans; those of one worker must be in the order of their ends, or in the order of their starts."""
        rows = list[tuple[Any, ...]]()
        pieces = list[tuple[Any, ...]]()
        calls = list[tuple[Any, ...]]()
        for span, offset, size in placed:
            if not is_in_time(span):
                continue
            start, end = span.start, max(span.start, span.end)  # a clock may be set back
            if not self._actors and not rows:
                self.start, self.end = start, end
            self.start, self.end = min(self.start, start), max(self.end, end)
            number = self._actor(span.actor)
            actor = self._known[number]
            kind = self._kind(span.kind)
            rows.append(
                (
                    start,
                    end,
                    offset,
                    size,
                    number,
                    group_of(span.args.group, span.args.sample),
                    actor.track_of(start, end),
                    kind,
                )
            )
            if span.kind in WAITS:
                pieces.append((start, end, number, True))
            elif span.kind != "outage":
                pieces += [(one, other, number, False) for one, other in actor.uncovered(start, end)]
            calls += [(start, end, offset, size, number, prompt) for prompt in prompts_of(span.args.prompts)]
        for table, added in ((self._rows, rows), (self._pieces, pieces), (self._calls, calls)):
            if added:
                table.extend(added)

    def _actor(self, name: str) -> int:
        name = name[:_LONGEST_NAME]
        if len(self._known) >= _MOST_ACTORS and name not in self._actors:
            name = _OTHERS
        if (number := self._actors.get(name)) is None:
            number = self._actors[name] = len(self._known)
            self._known.append(Actor(name))
        return number

    def _kind(self, name: str) -> int:
        name = name[:_LONGEST_NAME]
        if len(self._kind_of) > _MOST_KINDS:
            return self._kind_of.get(name, _MOST_KINDS)
        if (number := self._kind_of.get(name)) is None:
            number = self._kind_of[name] = min(len(self.kinds), _MOST_KINDS)
            self.kinds += [name] if number < _MOST_KINDS else []
        return number

    # ---- lanes ------------------------------------------------------------------------------------------------------

    def lanes(self) -> list[str]:
        """Return the slot ids, grouped by role."""
        if len(self._lane_of) != len(self._known):  # a new worker appeared
            self._lanes = lane_order(actor.name for actor in self._known)
            place = {slot: number for number, slot in enumerate(self._lanes)}
            self._lane_of = np.array([place[actor.worker.slot] for actor in self._known], np.int64)
        return self._lanes

    def _lane_of_actor(self) -> npt.NDArray[np.int64]:
        self.lanes()
        return self._lane_of

    def window(self, start: float, end: float, first: int, last: int, columns: int, most: int) -> Window:
        """Return the events between two moments on the lanes from `first` up to, but not including, `last`.

        Args:
            start, end: seconds since the epoch, `start` before `end`.
            first, last: positions in `lanes`.
            columns: the number of equal parts of the time for which shares are computed.
            most: the maximum number of spans that are returned individually."""
        lane_of = self._lane_of_actor()
        found: list[Records] = []
        number = 0
        for chunk in self._rows.between(start, end):
            inside = _inside(chunk, start, end, lane_of, first, last)
            number += int(np.count_nonzero(inside))
            if number > most:
                break
            found.append(chunk[inside])
        if number <= most:
            boxes = np.concatenate(found) if found else np.empty(0, _ROW)
            return Window(start, end, first, boxes, None, None)
        shares = self._shares(start, end, lane_of, first, last, columns)
        return Window(start, end, first, None, shares[0], shares[1])

    def lanes_of(self, boxes: Records) -> npt.NDArray[np.int64]:
        """Return the lane of each row."""
        return self._lane_of_actor()[boxes["actor"]]

    def _shares(
        self, start: float, end: float, lane_of: npt.NDArray[np.int64], first: int, last: int, columns: int
    ) -> list[npt.NDArray[np.uint8]]:
        covered = np.zeros((2, (last - first) * columns))
        scale = columns / (end - start)
        for chunk in self._pieces.between(start, end):
            inside = chunk[_inside(chunk, start, end, lane_of, first, last)]
            for place, waits in enumerate((False, True)):
                some = inside[inside["waits"] == waits]
                begin = np.clip((some["start"] - start) * scale, 0, columns)
                until = np.clip((some["end"] - start) * scale, 0, columns)
                lanes = lane_of[some["actor"]] - first
                covered[place] += _coverage(begin, until, lanes, last - first, columns)
        shape = (last - first, columns)
        return [np.clip(one.reshape(shape) * 255 + 0.5, 0, 255).astype(np.uint8) for one in covered]

    # ---- one group --------------------------------------------------------------------------------------------------

    def of_group(self, group: int, prompt: int | None, later: int | None = None) -> list[Where]:
        """Return the places of a group's spans, in the order they began.

        The spans of its scores are the calls that had its prompt between its first media and its training. If it was
        not trained, the interval ends at the first media of `later`, the next group of its prompt."""
        own = self._rows_of(group)
        if not len(own):
            return []
        found = [own]
        if prompt is not None:
            trained = own[own["kind"] == self._kind_of.get("train", -1)]
            since = self._first_media(own)
            if len(trained):
                until = trained["start"].min()
            else:
                until = np.inf if later is None else self._first_media(self._rows_of(later))
            found += [
                chunk[(chunk["prompt"] == prompt) & (chunk["start"] >= since) & (chunk["end"] <= until)]
                for chunk in self._calls.chunks()
            ]
        lane_of = self._lane_of_actor()
        places = {
            Where(
                float(row["start"]),
                int(row["offset"]),
                int(row["size"]),
                int(lane_of[row["actor"]]),
                self._known[row["actor"]].name,
            )
            for rows in found
            for row in rows
        }
        return sorted(places)

    def _rows_of(self, group: int) -> Records:
        mine = [chunk[chunk["group"] == group] for chunk in self._rows.chunks()]
        return np.concatenate(mine) if mine else np.empty(0, _ROW)

    def _first_media(self, own: Records) -> float:
        """Return when the first sample of a group was generated; infinity if that is unknown."""
        return float(own[own["kind"] == self._kind_of.get("generate", -1)]["end"].min(initial=np.inf))


def lane_order(actors: Iterable[str]) -> list[str]:
    """Return the slot ids of workers: generating, scoring and training roles first; within a role by number."""
    order = {role: place for place, role in enumerate((*WORKING, "publisher"))}

    def place(worker: Worker) -> tuple[int, str, int]:
        return order.get(worker.role, len(order)), worker.role, worker.index or 0

    workers = {worker.slot: worker for worker in map(Worker.parse, dict.fromkeys(actors))}
    return sorted(workers, key=lambda slot: place(workers[slot]))


def group_of(group: Any, sample: Any) -> int:
    """Return the group that a span's arguments name, directly or by a sample's id (`g12.s3`); -1 if there is none."""
    if isinstance(group, int) and 0 <= group < _LARGEST:
        return group
    if isinstance(sample, str) and sample.startswith("g"):
        digits = sample[1:].partition(".")[0]
        if digits.isdecimal() and len(digits) < 10:
            return int(digits)
    return -1


def is_in_time(span: SpanLine | ReadSpan) -> bool:
    """Return whether a span begins and ends at times that a clock can have."""
    return max(abs(span.start), abs(span.end)) < FARTHEST_S


def prompts_of(prompts: Any) -> list[int]:
    """Return the prompt numbers in the arguments of a span, as calls of scorers have them."""
    named = prompts if isinstance(prompts, list | tuple) else ()
    return [one for one in named[:_MOST_PROMPTS] if isinstance(one, int) and 0 <= one < _LARGEST]


def _inside(
    rows: Records, start: float, end: float, lane_of: npt.NDArray[np.int64], first: int, last: int
) -> npt.NDArray[np.bool_]:
    inside = (rows["start"] < end) & (rows["end"] > start)
    if first > 0 or last < lane_of.max(initial=-1) + 1:
        lanes = lane_of[rows["actor"]]
        inside &= (lanes >= first) & (lanes < last)
    return inside


def _coverage(
    begin: npt.NDArray[np.float64],
    until: npt.NDArray[np.float64],
    lanes: npt.NDArray[np.int64],
    num_lanes: int,
    columns: int,
) -> npt.NDArray[np.float64]:
    """Return the covered part of every column of every lane, in units of columns, as (lanes * columns,)."""
    a = np.minimum(begin.astype(np.int64), columns - 1)
    b = np.minimum(until.astype(np.int64), columns - 1)
    # Whole columns from a on, minus the uncovered beginning, plus the covered part of the last column.
    width = columns + 1
    edges = np.bincount(lanes * width + a, minlength=num_lanes * width)[: num_lanes * width].astype(np.float64)
    edges -= np.bincount(lanes * width + b, minlength=num_lanes * width)[: num_lanes * width]
    whole = np.cumsum(edges.reshape(num_lanes, width), axis=1)[:, :columns].reshape(-1)
    total = num_lanes * columns
    whole -= np.bincount(lanes * columns + a, weights=begin - a, minlength=total)[:total]
    whole += np.bincount(lanes * columns + b, weights=until - b, minlength=total)[:total]
    return whole
