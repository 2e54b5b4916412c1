"""Sums up how long workers were busy and waited, from the spans of a run of any length, in bounded memory.

A worker's overlapping spans count once. Its states exclude each other in this order: an engine that generates eight
samples while a ninth slot waits for a prompt is busy. The rest is time without records, or a scorer's outage.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from omni_async.config.role_table import WORKING
from omni_async.worker import Worker

Times = NDArray[np.float64]  # (number, 2): starts and ends

WAITS = ("backpressured", "starved")
STATES = ("busy", *WAITS)
# Stretches that are held, in 16 MB. Once there are more, the older half is summed up.
_MOST = 2**20
_NOTHING = np.zeros((0, 2))


class Stretch(Protocol):
    """The part of a span that counts here."""

    @property
    def actor(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...


class Activity:
    """The time of each state, per role and interval.

    `edges`: the boundaries of the intervals, in seconds of the spans' clock; the last may be infinite. The sums are
    exact, with one exception: of a span that began before the newest 500,000 stretches, only the later part counts."""

    def __init__(self, edges: Sequence[float] | Times, spans: Iterable[Stretch] = ()) -> None:
        self._edges = np.asarray(edges, np.float64)
        self._since = float(self._edges[0])  # everything earlier is in the sums
        self._stretches: dict[str, dict[str, array[float]]] = {}  # slot -> state -> starts and ends in turn
        self._slots: dict[str, str] = {}
        self._sums: dict[str, Times] = {}  # slot -> (states, intervals)
        self._overlap = 0.0
        self._room = _MOST
        self.add(spans)

    def add(self, spans: Iterable[Stretch]) -> None:
        """Add finished spans, in any order; a worker and its replacement count as one."""
        for span in spans:
            if (slot := self._slots.get(span.actor)) is None:
                slot = self._slots[span.actor] = Worker.parse(span.actor).slot
                self._stretches.setdefault(slot, defaultdict(lambda: array("d")))
            start, end = max(span.start, self._since), span.end
            if start < end and span.kind != "outage":
                self._stretches[slot][span.kind if span.kind in WAITS else "busy"].extend((start, end))
                self._room -= 1
                if self._room <= 0:
                    self._settle()

    def shares(self, end: float) -> dict[str, Times]:
        """Return role -> (intervals, 3), the mean shares of its workers' time up to `end` in each of `STATES`."""
        sums = self._with(end)[0]
        width = np.maximum(np.diff(np.minimum(self._edges, end)), 1e-9)
        per_role: dict[str, list[Times]] = defaultdict(list)
        for slot, covered in sums.items():
            per_role[Worker.parse(slot).role].append(np.diff(covered, axis=0, prepend=0.0).T / width[:, None])
        return {role: np.mean(rows, axis=0) for role, rows in sorted(per_role.items())}

    def overlap(self, end: float) -> float:
        """Return the share of the time up to `end` when two or more of rollout, reward and trainer were busy."""
        wall = end - float(self._edges[0])
        return self._with(end)[1] / wall if wall > 0 else 0.0

    def _with(self, end: float) -> tuple[dict[str, Times], float]:
        """Return the sums with those of the held stretches up to `end`: per slot and state, and of the overlap.

        The sum of a state includes the states before it."""
        sums: dict[str, Times] = {}
        busy: dict[str, list[Times]] = defaultdict(list)
        for slot, states in self._stretches.items():
            covered, columns = _NOTHING, []
            for state in STATES:
                own = _pairs(states[state]) if state in states else _NOTHING
                covered = united(np.concatenate([covered, np.minimum(own, end)]))
                columns.append(np.diff(covered_until(covered, self._edges)))
                if state == "busy":
                    busy[Worker.parse(slot).role].append(covered)
            sums[slot] = np.stack(columns) + self._sums.get(slot, 0.0)
        roles = [united(np.concatenate(busy[role])) for role in WORKING if role in busy]
        return sums, self._overlap + _by_two(roles)

    def _settle(self) -> None:
        """Unite the held stretches; if many are left, move the older half of them into the sums."""
        for states in self._stretches.values():
            for state, own in states.items():
                states[state] = _as_array(united(_pairs(own)))
        ends = np.concatenate([_pairs(own)[:, 1] for one in self._stretches.values() for own in one.values()])
        if len(ends) > _MOST // 2:
            self._since = float(np.median(ends))
            self._sums, self._overlap = self._with(self._since)
            for states in self._stretches.values():
                for state, own in states.items():
                    later = np.maximum(_pairs(own), self._since)
                    states[state] = _as_array(later[later[:, 0] < later[:, 1]])
        self._room = _MOST - sum(len(own) // 2 for one in self._stretches.values() for own in one.values())


def busy_fractions(activity: Activity, end: float) -> dict[str, dict[str, float]]:
    """Return role -> mean share of the time up to `end` in each of `STATES`, of an activity with one interval."""
    return {role: dict(zip(STATES, map(float, rows[0]), strict=True)) for role, rows in activity.shares(end).items()}


def united(intervals: Times) -> Times:
    """Return the same points of time as sorted disjoint intervals (n, 2); empty ones vanish."""
    intervals = intervals[intervals[:, 0] < intervals[:, 1]]
    if not len(intervals):
        return intervals.reshape(0, 2)
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reached = np.maximum.accumulate(intervals[:, 1])
    first = np.concatenate([[True], intervals[1:, 0] > reached[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([intervals[first, 0], reached[last]], axis=1)


def covered_until(times: Times, edges: Times) -> Times:
    """Return how many seconds of `times`, sorted and disjoint, precede each edge."""
    if not len(times):
        return np.zeros(len(edges))
    before = np.concatenate([[0.0], np.cumsum(times[:, 1] - times[:, 0])])
    number = np.searchsorted(times[:, 0], edges, side="right")
    inside = np.where(number > 0, edges - times[np.maximum(number - 1, 0), 0], 0.0)
    longest = np.where(number > 0, (times[:, 1] - times[:, 0])[np.maximum(number - 1, 0)], 0.0)
    return before[np.maximum(number - 1, 0)] + np.minimum(inside, longest)


def _by_two(sets: Sequence[Times]) -> float:
    """Return the seconds that two or more of some sets of disjoint intervals cover."""
    edges = np.concatenate([_NOTHING, *sets]).reshape(-1)
    order = np.argsort(edges, kind="stable")
    depth = np.cumsum(np.tile([1, -1], len(edges) // 2)[order])
    return float(np.diff(edges[order])[depth[:-1] >= 2].sum())


def _pairs(own: array[float]) -> Times:
    return np.array(own).reshape(-1, 2)  # a copy: a view would keep the array from growing


def _as_array(times: Times) -> array[float]:
    return array("d", times.tobytes())
