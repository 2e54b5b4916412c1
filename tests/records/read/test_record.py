"""Tests that a run's folder is read whatever became of the run, and that nothing else is taken for one."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from omni_async.config import ConfigError
from omni_async.records.read.follow import Follower
from omni_async.records.read.record import Run, read_run
from omni_async.records.read.rounds import read_rounds
from omni_async.records.write.rundir import RunDirectory, append_jsonl
from omni_async.records.write.summary import write_summary
from omni_async.records.write.timeline import write_trace
from omni_async.types import LedgerEntry, Span
from tests.runtime.runtime_world import write_world
from tests.support.configs import make_summary


def line(**changes: Any) -> dict[str, Any]:
    return {"update": 1, "reward": 0.5, "finished": 1000.0, **changes}


def entry(group: int) -> LedgerEntry:
    return LedgerEntry("made", group, 0, "trained", None, 0, 1, 0, (0, 0), 1, 0.5)


SPANS = [Span("rollout-0", "generate", 1000.0, 1001.0, {"sample": "g0.s0"}), Span("trainer", "train", 1001, 1002)]


def decoded(run: Run) -> list[Span]:
    return [Span(one.actor, one.kind, one.start, one.end, json.loads(bytes(one.args))) for one in run.spans()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run that was killed after two updates and one validation round."""
    made = tmp_path / "made-20260101-120000"
    (made / "samples").mkdir(parents=True)
    (made / "config.yaml").write_text("rollout: {workers: 2, sde: {kind: cps}}\nstaleness: {max_updates: 2}\n")
    run = RunDirectory(made)
    for record in (line(), line(update=2, finished=1010.0), {"update": 0, "validation/reward": 0.25}):
        append_jsonl(run.metrics, record)
    for group in range(3):
        append_jsonl(run.ledger, entry(group))
    append_jsonl(run.spans, SPANS[0])
    return made


def test_a_killed_run_has_its_updates_rounds_endings_and_spans(folder):
    run = read_run(folder)
    assert (run.id, run.status, run.summary, run.reason) == ("made-20260101-120000", "killed", None, None)
    assert [one["update"] for one in run.updates] == [1, 2]
    assert run.rounds == [{"update": 0, "validation/reward": 0.25}]
    assert run.ledger == [entry(group) for group in range(3)]
    assert decoded(run) == SPANS[:1]
    assert run.setting("rollout.sde.kind") == "cps"
    assert run.setting("rollout.sde.nothing", 7) == run.setting("staleness.max_updates.deeper", 7) == 7
    assert not any((run.faults, run.attempts, run.checkpoints, run.grids, run.profile, run.left_out))


def test_updates_after_the_point_that_a_running_attempt_resumes_from_do_not_count(folder):
    write_summary(folder / "summary.json", make_summary(status="interrupted", reason="on request"))
    append_jsonl(folder / "metrics.jsonl", {"update": 2, "validation/reward": 0.75})
    held = RunDirectory.reopen(folder)
    held.state_resumption(1, 0, 2)
    run = read_run(folder)
    assert ([one["update"] for one in run.updates], run.rounds) == ([1], [{"update": 0, "validation/reward": 0.25}])
    assert (len(run.ledger), run.summary, run.status) == (2, None, "running")
    assert run.left_out == {"metrics.jsonl": "the run resumes from update 1 and makes later updates again"}
    held.release()
    run = read_run(folder)
    assert (len(run.updates), len(run.rounds), len(run.ledger), run.left_out) == (2, 2, 3, {})
    assert run.summary is not None

    held = RunDirectory.reopen(folder)
    held.state_resumption(1, None, 2)
    assert read_run(folder).rounds == []
    held.take_over(write_world(folder.parent), 1, None)
    append_jsonl(folder / "metrics.jsonl", line(update=2, reward=0.75, finished=2000.0))
    assert [one["reward"] for one in read_run(folder).updates] == [0.5, 0.75]
    held.release()


@pytest.mark.parametrize("content", [b"{", b"[" * 500, b'{"update": -1}', b"null", b""])
def test_a_statement_that_was_edited_is_none(folder, content):
    held = RunDirectory.reopen(folder)
    (folder / ".lock").write_bytes(content)
    assert RunDirectory(folder).resumption() is None and len(read_run(folder).updates) == 2
    held.release()


def test_an_update_that_is_repeated_counts_once(folder):
    """The newest attempt's lines replace those of the attempt before it."""
    for record in (
        line(update=3, finished=1020.0),
        {"update": 3, "validation/reward": 0.5},
        line(update=2, reward=0.75),
    ):
        append_jsonl(folder / "metrics.jsonl", record)
    append_jsonl(folder / "metrics.jsonl", {"update": 0, "validation/reward": 0.125})
    run, follower = read_run(folder), Follower(folder)
    deque(follower.poll(), maxlen=0)
    assert [(one["update"], one["reward"]) for one in run.updates] == [(1, 0.5), (2, 0.75)]
    assert run.rounds == [{"update": 0, "validation/reward": 0.125}]
    assert [*follower.updates.column("update")] == [1, 2] and [*follower.updates.column("reward")] == [0.5, 0.75]
    assert read_rounds([{"update": 0, "validation/reward": 0.5}, *run.rounds]) == run.validation


def test_the_status_of_a_run(folder):
    held = RunDirectory.reopen(folder)
    assert read_run(folder).status == "running"
    held.release()
    attempt = {"began": 990.0, "status": "failed", "reason": "no room", "from_update": 0, "to_update": 2, "wall_s": 9.0}
    append_jsonl(folder / "attempts.jsonl", {**attempt, "ended": 1011.0})
    assert (read_run(folder).status, read_run(folder).reason) == ("failed", "no room")
    append_jsonl(folder / "metrics.jsonl", line(update=3, finished=2000.0))
    assert read_run(folder).status == "killed", "a later attempt left no line"
    for status, reason in (("done", None), ("interrupted", "the trainer is gone"), ("failed", "the trainer is gone")):
        write_summary(folder / "summary.json", make_summary(status=status, reason=reason))
        assert (read_run(folder).status, read_run(folder).reason) == (status, reason)


def test_a_cut_off_last_line_is_nothing_and_a_damaged_one_is_counted(folder):
    damaged = {"ledger.jsonl": "2 lines cannot be read, the first is line 4"}
    for added, left_out in ((b'{"run": "made", "gro', {}), (b"\n[1]\n", damaged)):
        with (folder / "ledger.jsonl").open("ab") as file:
            file.write(added)
        assert (len(read_run(folder).ledger), read_run(folder).left_out) == (3, left_out)


def test_what_another_version_wrote_is_left_out_and_said(folder):
    (folder / "summary.json").write_text('{"run": "made", "status": "done"}')
    (folder / "config.yaml").write_text("model: [")
    (folder / "trace.json").write_text('{"events": []}')
    (folder / "spans.jsonl").unlink()
    run = read_run(folder)
    assert (run.summary, run.config, run.status, decoded(run)) == (None, {}, "killed", [])
    assert {*run.left_out} == {"summary.json", "config.yaml", "trace.json"}


def test_the_spans_of_a_run_that_ended_are_its_timeline_s(folder):
    write_trace(folder / "trace.json", SPANS)
    (folder / "spans.jsonl").unlink()
    assert decoded(read_run(folder)) == SPANS


def test_samples_are_read_by_kind_and_version_and_their_files_lie_in_the_folder(folder):
    samples = folder / "samples"
    (samples / "validation-000020-00.png").write_bytes(b"png")
    rows = [
        {"prompt": "the digit 7", "target": "7", "image": "validation-000020-00.png"},
        {"prompt": "elsewhere", "image": "../../validation-000020-00.png", "video": "gone.mp4"},
    ]
    for name in ("validation-000020", "validation-000000", "train-000003"):
        (samples / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (samples / "notes.jsonl").write_text("{}\n")
    grids = read_run(folder).grids
    assert [(grid.kind, grid.version) for grid in grids] == [("validation", 0), ("validation", 20), ("train", 3)]
    first, second = grids[1].tiles
    assert (first.prompt, first.target, first.image) == ("the digit 7", "7", samples / "validation-000020-00.png")
    assert second.image == samples / "validation-000020-00.png" and second.video is None
    assert grids[1].image == samples / "validation-000020.png"


def test_checkpoints_are_found_by_version(folder):
    for name in ("update-000050", ".update-000060.old", ".update-000070.partial"):
        (folder / "checkpoints" / name).mkdir(parents=True)
    found = read_run(folder).checkpoints
    assert {version: path.name for version, path in found.items()} == {60: ".update-000060.old", 50: "update-000050"}


@pytest.mark.parametrize("name", ["nothing", "a_file", "a_folder"])
def test_what_is_no_run_folder_is_refused_in_one_line(tmp_path, name):
    (tmp_path / "a_file").write_text("")
    (tmp_path / "a_folder").mkdir()
    with pytest.raises(ConfigError, match=rf"{name} is not a run folder: .*runs/quickstart-20260101-120000"):
        read_run(tmp_path / name)
