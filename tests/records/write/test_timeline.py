"""Tests sets of time, the trace that Perfetto reads, and the shares of time that roles were busy."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_async.records.write import timeline
from omni_async.types import Span

INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def points(members: list[tuple[int, int]]) -> set[int]:
    """Returns the unit cells that integer intervals cover."""
    return {cell for start, end in members for cell in range(start, end)}


@given(INTERVALS)
def test_a_union_covers_the_same_points_once(members: list[tuple[int, int]]) -> None:
    merged = timeline.union(members)
    assert points(merged) == points(members)
    assert timeline.length(merged) == len(points(members))
    assert all(end < start for (_, end), (start, _) in pairwise(merged))
    assert timeline.union(merged) == merged


@given(INTERVALS, st.integers(0, 40), st.integers(0, 40))
def test_clipping_keeps_the_inside(members: list[tuple[int, int]], start: int, end: int) -> None:
    assert points(timeline.clip(members, start, end)) == points(members) & set(range(start, end))


@given(st.lists(INTERVALS, max_size=4), st.integers(1, 3))
def test_at_least_counts_sets_not_intervals(sets: list[list[tuple[int, int]]], count: int) -> None:
    expected = {cell for cell in range(41) if sum(cell in points(members) for members in sets) >= count}
    assert points(timeline.at_least(count, sets)) == expected


def concurrent_spans() -> list[Span]:
    generate = [Span("rollout-0", "generate", 100 + 0.1 * i, 102 + 0.1 * i, {"sample": f"g{i}"}) for i in range(16)]
    others = (
        ("trainer-0", "train", 101.0, 103.0),
        ("rollout-0", "swap", 110.0, 110.5),
        ("reward-0", "score", 99, 99.5),
    )
    return [*generate, *(Span(*each) for each in others)]


def start_of(span: Span) -> tuple[str, str, float]:
    return span.actor, span.kind, span.start


def test_a_trace_holds_every_span_and_its_time_those_of_an_actor_on_lanes_without_overlap(tmp_path: Path) -> None:
    path, spans = tmp_path / "trace.json", concurrent_spans()
    timeline.write_trace(path, spans)
    read = sorted(timeline.read_trace(path), key=start_of)
    for found, written in zip(read, sorted(spans, key=start_of), strict=True):
        assert (found.actor, found.kind, found.args) == (written.actor, written.kind, written.args)
        assert (found.start, found.end) == pytest.approx((written.start, written.end), abs=2e-6)
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == ["reward-0", "rollout-0", "trainer-0"]
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == 19
    times = [e[key] for e in complete for key in ("ts", "dur")]
    assert min(e["ts"] for e in complete) == 0 and all(isinstance(time, int) and time >= 0 for time in times)
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for e in complete:
        lanes.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    assert all(end <= start for lane in lanes.values() for (_, end), (start, _) in pairwise(sorted(lane)))
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads.keys() == lanes.keys()
    rollout = next(pid for pid, name in names.items() if name == "rollout-0")
    assert sorted(n for (pid, _), n in threads.items() if pid == rollout)[:2] == ["rollout-0", "rollout-0 #10"]
    assert sum(pid == rollout for pid, _ in lanes) == 16
    assert {e["args"].get("sample") for e in complete if e["name"] == "generate"} == {f"g{i}" for i in range(16)}


@given(st.lists(st.tuples(st.floats(0, 1e-4), st.floats(0, 1e-4)), max_size=20))
def test_lanes_hold_after_rounding_to_microseconds(times: list[tuple[float, float]]) -> None:
    spans = [Span("a", "k", 1e9 + start, 1e9 + start + duration) for start, duration in times]
    complete = [e for e in timeline.trace_events(spans)["traceEvents"] if e["ph"] == "X"]
    for lane in {e["tid"] for e in complete}:
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in complete if e["tid"] == lane)
        assert all(end <= start for (_, end), (start, _) in pairwise(own))


def test_an_empty_trace_and_odd_arguments_are_written(tmp_path: Path) -> None:
    assert timeline.trace_events([])["traceEvents"] == []
    timeline.write_trace(tmp_path / "t.json", [Span("a", "k", 1.0, 0.5, {"nan": float("nan"), "object": int})])
    [event] = [e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert event["dur"] == 0 and event["args"] == {"nan": None, "object": "<class 'int'>"}
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_fractions_are_unions_per_actor_averaged_over_the_role() -> None:
    first = (("generate", 0, 6), ("generate", 2, 8), ("starved", 7, 10))
    second = (("generate", -5, 4), ("backpressured", 4, 9))
    of_actors = {"rollout-0": first, "rollout-1": second, "trainer": (("train", 5, 10), ("starved", 0, 5))}
    spans = [Span(actor, *each) for actor, times in of_actors.items() for each in times]
    fractions = timeline.busy_fractions(spans, 0, 10)
    assert fractions["rollout"] == pytest.approx({"busy": 0.6, "backpressured": 0.25, "starved": 0.1})
    assert fractions["trainer"] == pytest.approx({"busy": 0.5, "backpressured": 0.0, "starved": 0.5})
    assert timeline.overlap_fraction(spans, 0, 10) == pytest.approx(0.3)
    assert timeline.overlap_fraction(spans, 0, 0) == 0.0


def test_a_replacement_is_the_same_actor_an_outage_is_no_work_and_two_actors_of_a_role_are_no_overlap() -> None:
    spans = [Span("reward-0", "score", 0, 4), Span("reward-0.2", "score", 6, 10), Span("reward-1", "outage", 0, 10)]
    spans.append(Span("publisher", "publish", 0, 10))
    shares = {"busy": 0.4, "backpressured": 0.0, "starved": 0.0}
    assert timeline.busy_fractions(spans, 0, 10)["reward"] == pytest.approx(shares)
    assert timeline.overlap_fraction([*spans, Span("reward-1", "score", 0, 10)], 0, 10) == 0.0
    assert timeline.overlap_fraction([*spans, Span("trainer", "train", 0, 10)], 0, 10) == pytest.approx(0.8)
