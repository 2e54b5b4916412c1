"""Tests that a run folder is followed: what is added, cut off, rewritten, and what takes the place of what."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from omni_async.commands.report.alerts import alerts_section
from omni_async.commands.report.shown import show
from omni_async.commands.report.verdict import verdict
from omni_async.commands.report.waiting import waiting
from omni_async.records.read import follow, line_files
from omni_async.records.read.alerts import alerts
from omni_async.records.read.follow import Follower
from omni_async.records.read.line_files import GrowingFile
from omni_async.records.read.record import read_run
from omni_async.records.read.seen import seen_of
from omni_async.records.read.trace_file import NotATrace, read_trace, trace_spans
from omni_async.records.write.attempts import Attempt, Fault
from omni_async.records.write.files import read_lines, read_records
from omni_async.records.write.rundir import append_jsonl
from omni_async.types import Span
from tests.support.made_run import ORIGIN, MadeRun


def polled(follower: Follower) -> Follower:
    for _ in follower.poll():
        pass
    return follower


def test_what_a_run_adds_is_found_and_nothing_is_read_twice(tmp_path: Path) -> None:
    run = MadeRun(groups=40).write(tmp_path)
    follower = polled(Follower(tmp_path))
    assert (len(follower.updates), len(follower.ended), follower.ended.events["rejected"]) == (4, 40, 3)
    assert follower.updates.column("finished")[-1] == ORIGIN + 16
    assert follower.updates.column("conservation/admitted", newest=2).tolist() == [30, 40]
    assert len(follower.spans) == len(read_records(run.spans, Span))
    changes = follower.changes
    assert polled(follower).changes == changes
    MadeRun(groups=110, first=40).write(tmp_path)
    ended = polled(follower).ended
    assert (len(follower.updates), len(follower.rounds), len(ended)) == (11, 1, 110)
    assert len(follower.spans) == len(read_records(run.spans, Span))
    assert follower.changes > changes and follower.lines_cut == 0
    prompts = [int(prompt) for prompt in ended.all()["prompt"]]
    assert prompts[3] == prompts[100] and ended.next_of(prompts[3], 3) == 100
    assert ended.next_of(prompts[3], 100) is None and ended.next_of(10**6, 0) is None


def test_a_line_that_is_cut_off_waits_for_its_rest(tmp_path: Path) -> None:
    run = MadeRun(groups=10).write(tmp_path)
    follower = polled(Follower(tmp_path))
    line = msgspec.json.encode(MadeRun(groups=20).entry(11)) + b"\n"
    with run.ledger.open("ab") as file:
        file.write(line[:50])
        file.flush()
        assert len(polled(follower).ended) == 10
        file.write(line[50:])
    assert len(polled(follower).ended) == 11
    assert msgspec.json.encode(follower.ledger_line(11)) + b"\n" == line
    assert follower.lines_cut == 0


def test_files_that_a_resumed_run_rewrites_are_read_again_even_if_they_grew_meanwhile(tmp_path: Path) -> None:
    run = MadeRun(groups=40).write(tmp_path)
    follower = polled(Follower(tmp_path))
    kept = read_lines(run.ledger)[:20]
    run.ledger.write_bytes(b"".join(kept))
    run.void_metrics(2, None)
    run.spans.unlink()
    MadeRun(groups=100, first=20, seed=1).write(tmp_path)  # longer than before, and other numbers
    assert run.ledger.stat().st_size > 40 * 150
    polled(follower)
    assert len(follower.ended) == 100 and len(follower.updates) == 10
    rows = follower.ended.all()
    assert rows["group"].tolist() == list(range(100))
    rewards = [json.loads(line)["reward"] for line in read_lines(run.ledger)]
    np.testing.assert_allclose(rows["reward"], rewards, rtol=1e-6)
    assert len(follower.spans) == len(read_records(run.spans, Span))


def test_the_end_of_a_large_file_is_read_first_and_then_all_of_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"".join(b"%06d\n" % n for n in range(1000)))
    monkeypatch.setattr(line_files, "_BLOCK", 256)
    file = GrowingFile(path, newest_first=700)
    found, offsets, regions = [], [], 0
    for block in file.blocks():
        found += [int(line) for line in block.lines]
        offsets.append(block.offset)
        regions += block.begins_region
    assert found[0] > 890 and found[-1] == found[0] - 1 and sorted(found) == list(range(1000))
    assert regions == 1 and not file.changed()
    with path.open("ab") as more:
        more.write(b"001000\n")
    assert file.changed() and not file.was_rewritten()
    assert [block.lines for block in file.blocks()] == [[b"001000\n"]]
    path.write_bytes(b"a" * 1000 + b"\nb\n")
    lines = [line for block in GrowingFile(path).blocks() for line in block.lines]
    assert b"".join(lines) == path.read_bytes(), "a line longer than a block"


def test_the_timeline_takes_the_place_of_the_spans_when_the_run_is_over(tmp_path: Path) -> None:
    run = MadeRun(groups=30).write(tmp_path)
    follower = polled(Follower(tmp_path))
    live = [span for span, _ in follower.spans_of(7, 7)]
    MadeRun(groups=30).write(tmp_path / "other", over=True)
    run.spans.unlink()
    (tmp_path / "other" / "trace.json").replace(run.trace)
    polled(follower)
    assert len(follower.spans) == len([*read_trace(run.trace)])
    over = [span for span, _ in follower.spans_of(7, 7)]
    assert [(one.actor, one.kind, one.args) for one in over] == [(one.actor, one.kind, one.args) for one in live]
    assert [one.start for one in over] == pytest.approx([one.start for one in live], abs=2e-6)
    assert [one.kind for one in over] == ["generate"] * 4 + ["score", "train"]


def test_a_timeline_read_in_blocks_has_the_spans_of_one_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("omni_async.records.read.trace_file._BLOCK", 333)
    run = MadeRun(groups=30).write(tmp_path, over=True)
    found = [one for placed in trace_spans(run.trace) for one in placed]
    whole = [*read_trace(run.trace)]
    assert [(o.span.actor, o.span.kind, o.span.start) for o in found] == [(s.actor, s.kind, s.start) for s in whole]
    text = run.trace.read_bytes()
    for one in found:
        event = json.loads(text[one.offset : one.offset + one.size])
        assert event["name"] == one.span.kind


@pytest.mark.parametrize("content", [b"", b"{}", b'{"traceEvents":[],"otherData":{"origin_s":x}}', b"[" * 5000])
def test_a_timeline_of_something_else_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "trace.json").write_bytes(content)
    with pytest.raises(NotATrace, match="no timeline that a run wrote"):
        list(trace_spans(tmp_path / "trace.json"))


def test_a_timeline_without_ends_of_events_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_async.records.read.trace_file._LONGEST", 2**18)
    run = MadeRun(groups=3).write(tmp_path, over=True)
    text = run.trace.read_bytes()
    for before, after in ((b"[", b'[{"ph":"X","name":"'), (b'"name":"', b'"name":"')):
        run.trace.write_bytes(text.replace(before, after + b"x" * 2**20, 1))
        with pytest.raises(NotATrace):
            list(trace_spans(run.trace))


def test_a_timeline_that_cannot_be_read_is_reported_until_another_takes_its_place(tmp_path: Path) -> None:
    run = MadeRun(groups=3).write(tmp_path, over=True)
    whole = run.trace.read_bytes()
    nested = b'{"ph":"X","name":"generate","pid":1,"more":' + b"[" * 5000 + b"]" * 5000 + b"}"
    run.trace.write_bytes(whole.replace(b"[", b"[" + nested + b",", 1))
    follower = polled(Follower(tmp_path))
    assert follower.problem is not None and "cannot be read" in follower.problem
    run.trace.write_bytes(whole)
    assert polled(follower).problem is None and len(follower.spans) > 0
    empty = MadeRun(groups=0).write(tmp_path / "empty", over=True)
    assert [one for placed in trace_spans(empty.trace) for one in placed] == []


def test_small_files_and_sample_tables_are_noticed_when_they_come_and_go(tmp_path: Path) -> None:
    run = MadeRun(groups=10).write(tmp_path)
    follower = polled(Follower(tmp_path))
    assert (follower.faults, follower.attempts, follower.summary, follower.samples) == ([], [], None, [])
    fault = Fault(1.0, "rollout-0", "killed", "rollout-0.2", 3.0)
    attempt = Attempt(0.0, 1.0, "done", None, 0, 1, 1.0)
    append_jsonl(run.faults, fault)
    append_jsonl(run.attempts, attempt)
    (run.samples / "train-000010.jsonl").write_bytes(b"{}\n")
    (run.samples / "validation-000010.jsonl").write_bytes(b"{}\n")
    (run.samples / "train-000010-00.png").write_bytes(b"")
    polled(follower)
    assert (follower.faults, follower.attempts) == ([fault], [attempt])
    assert follower.samples == [("train", 10), ("validation", 10)]
    run.faults.unlink()
    assert polled(follower).faults == []


def test_what_is_no_record_is_counted_and_left_out(tmp_path: Path) -> None:
    run = MadeRun(groups=10).write(tmp_path)
    for path in (run.ledger, run.metrics, run.spans):
        with path.open("ab") as file:
            file.write(b'{"half": \n\xff\xfe\n')
    follower = polled(Follower(tmp_path))
    assert (len(follower.ended), len(follower.updates), follower.lines_cut) == (10, 1, 6)
    assert "ledger.jsonl: 2 lines cannot be read" in str(follower.problem)
    for path in (run.ledger, run.metrics, run.spans):
        path.write_bytes(path.read_bytes().partition(b'{"half"')[0])
    assert polled(follower).problem is None and len(follower.ended) == 10


ENTRY = {
    "run": "made", "group": 7, "prompt": 7, "event": "trained", "reason": None, "admitted_version": 0,
    "trained_version": 1, "staleness": 0, "step_versions": [0, 0], "attempts": 1, "reward": 0.5,
}  # fmt: skip
SPAN = {"actor": "rollout-0", "kind": "score", "start": ORIGIN, "end": ORIGIN + 1, "args": {}}
UPDATE = {"update": 9, "finished": 1.0, "reward": 0.5}


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("ledger", {**ENTRY, "group": 2**40}),
        ("ledger", {**ENTRY, "prompt": -1}),
        ("ledger", {**ENTRY, "staleness": 10**30}),
        ("spans", {**SPAN, "args": {"group": 2**40}}),
        ("spans", {**SPAN, "args": {"prompts": 5}}),
        ("spans", {**SPAN, "args": {"prompts": ["a", 2**40, None]}}),
        ("spans", {**SPAN, "start": -1e308, "end": 1e308}),
        ("metrics", {**UPDATE, "scorer/x/failed": 1e300, "scorer/x/samples": 1e300}),
        ("metrics", {**UPDATE, "loss": {"nats": 1.0}, "loss/nats": 2.0}),
        ("metrics", {"update": 2**52, "finished": 1e299, "reward": -1e300, "update_s": 1e300}),
    ],
)
def test_numbers_that_no_run_writes_cost_their_own_line(tmp_path: Path, file: str, line: dict[str, object]) -> None:
    run = MadeRun(groups=60).write(tmp_path)
    with getattr(run, file).open("a") as lines:
        lines.write(f"{json.dumps(line)}\n" * 6)
    follower = polled(Follower(tmp_path))
    alerts(seen_of(follower, "killed", None, 2e9))
    assert [*follower.ended.all()["group"]] == [*range(60)]
    assert {len(follower.updates.column(name)) for name in follower.updates} == {len(follower.updates)}
    spans = follower.spans
    assert spans.end - spans.start < 1e9
    assert spans.window(spans.start, spans.end, 0, 9, 10, -1).busy is not None
    report = [section(show([read_run(tmp_path)])) for section in (waiting, alerts_section, verdict)]
    assert msgspec.json.encode(report)


def test_reasons_beyond_the_limit_are_counted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "_MOST_REASONS", 2)
    ended = follow.Ended()
    entry = MadeRun(groups=10).entry(3)
    ended.add([(msgspec.structs.replace(entry, reason=f"reason {n}"), 0, 1) for n in range(5)])
    assert ended.why("rejected") == {"reason 0": 1, "reason 1": 1, "another reason": 3}
    assert ended.why("dropped") == {}
