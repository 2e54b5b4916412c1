"""Tests sets of time, and the trace that Perfetto reads."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_async.records.read.trace_file import read_trace
from omni_async.records.write import timeline
from omni_async.types import Span

INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def points(members: list[tuple[int, int]]) -> set[int]:
    """Returns the unit cells that integer intervals cover."""
    return {cell for start, end in members for cell in range(start, end)}


@given(st.lists(INTERVALS, min_size=1, max_size=4), st.integers(1, 3), st.integers(0, 40), st.integers(0, 40))
def test_sets_of_time(sets: list[list[tuple[int, int]]], count: int, start: int, end: int) -> None:
    members = sets[0]
    merged = timeline.union(members)
    assert points(merged) == points(members) and timeline.length(merged) == len(points(members))
    assert all(end < start for (_, end), (start, _) in pairwise(merged))
    assert points(timeline.clip(members, start, end)) == points(members) & set(range(start, end))
    expected = {cell for cell in range(41) if sum(cell in points(each) for each in sets) >= count}
    assert points(timeline.at_least(count, sets)) == expected


def start_of(span: Span) -> tuple[str, float]:
    return span.actor, span.start


def test_a_trace_holds_every_span_those_of_an_actor_on_lanes_without_overlap(tmp_path: Path) -> None:
    spans = [Span("rollout-0", "generate", 100 + 0.1 * i, 102 + 0.1 * i, {"sample": f"g{i}"}) for i in range(16)]
    spans += [Span("rollout-0", "swap", 110.0, 110.5), Span("trainer-0", "train", 101.0, 103.0)]
    path = tmp_path / "trace.json"
    timeline.write_trace(path, spans)
    read = sorted(read_trace(path), key=start_of)
    for found, written in zip(read, sorted(spans, key=start_of), strict=True):
        assert (found.actor, found.kind, found.args) == (written.actor, written.kind, written.args)
        assert (found.start, found.end) == pytest.approx((written.start, written.end), abs=2e-6)
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["rollout-0", "trainer-0"]
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for e in events:
        if e["ph"] == "X":
            lanes.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    assert min(start for lane in lanes.values() for start, _ in lane) == 0
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads.keys() == lanes.keys()
    own = sorted(name for (pid, _), name in threads.items() if names[pid] == "rollout-0")
    assert len(own) == 16 and own[:2] == ["rollout-0", "rollout-0 #10"]


@given(st.lists(st.tuples(st.floats(0, 1e-4), st.floats(0, 1e-4)), max_size=20))
def test_lanes_hold_after_rounding_to_microseconds(times: list[tuple[float, float]]) -> None:
    spans = [Span("a", "k", 1e9 + start, 1e9 + start + duration) for start, duration in times]
    complete = [e for e in timeline.trace_events(spans, 1e9, "a") if e["ph"] == "X"]
    for lane in {e["tid"] for e in complete}:
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in complete if e["tid"] == lane)
        assert all(end <= start for (_, end), (start, _) in pairwise(own))


def test_an_empty_trace_and_odd_arguments_are_written(tmp_path: Path) -> None:
    timeline.write_trace(tmp_path / "t.json", [])
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"] == []
    timeline.write_trace(tmp_path / "t.json", [Span("a", "k", 1.0, 0.5, {"nan": float("nan"), "object": int})])
    [event] = [e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert event["dur"] == 0 and event["args"] == {"nan": None, "object": "<class 'int'>"}
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]
