"""Tests that a run without space left on the device ends soon, says so in one line, and keeps the checkpoint it has."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from omni_async import cli
from omni_async.aio.clock import Clock
from omni_async.checkpoint.folders import newest_first, require_whole
from omni_async.config import load
from omni_async.config.schema import Config
from omni_async.driver import results, session
from omni_async.driver import train as runtime
from omni_async.driver.train import train
from omni_async.preflight.check import preflight
from omni_async.runtime.cluster import PeerLost
from omni_async.tracking.rundir import RunDirectory
from omni_async.tracking.summary import read_summary
from tests.e2e.emulation import write_recipe
from tests.e2e.runs import ENVIRONMENT
from tests.runtime.runtime_world import Control, HandCluster, RememberingConsole, write_world

QUICK = ["emulation.time_scale=0.001", "trainer.updates=400", "checkpoint.every=2", "run.restarts=2"]


def fill(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Puts these files of the run folder on a device that is full."""
    create = RunDirectory.create.__func__  # type: ignore[attr-defined]

    def on_a_full_disk(cls: type[RunDirectory], config: Config, clock: Clock) -> RunDirectory:
        run: RunDirectory = create(cls, config, clock)
        for name in names:
            (run.path / name).symlink_to("/dev/full")
        return run

    monkeypatch.setattr(RunDirectory, "create", classmethod(on_a_full_disk))


def obstruct(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Makes it impossible to rename these files of the run folder to their final path."""
    create = RunDirectory.create.__func__  # type: ignore[attr-defined]

    def obstructed(cls: type[RunDirectory], config: Config, clock: Clock) -> RunDirectory:
        run: RunDirectory = create(cls, config, clock)
        for name in names:
            (run.path / name / "in the way").mkdir(parents=True)
        return run

    monkeypatch.setattr(RunDirectory, "create", classmethod(obstructed))


SHORT = ["emulation.time_scale=0.001", "trainer.updates=4"]
RESULTS = {"summary.json", "profile.json", "trace.json", "attempts.jsonl"}


@pytest.mark.parametrize("lost", sorted(RESULTS))
def test_one_result_that_cannot_be_written_costs_no_other_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lost: str
) -> None:
    obstruct(monkeypatch, lost)
    assert cli.main(["train", str(write_recipe(tmp_path)), *SHORT]) == 1
    said = capsys.readouterr()
    assert said.err == f"omni-async: not everything could be written: {lost} (Is a directory)\n"
    assert f"not written: {lost} (Is a directory)" in said.out
    (run,) = (tmp_path / "runs").iterdir()
    assert all((run / name).is_file() for name in RESULTS - {lost})
    if lost != "summary.json":
        summary = read_summary(run / "summary.json")
        assert (summary.status, summary.unwritten) == ("done", {lost: "Is a directory"})
    assert (run / "spans.jsonl").exists() == (lost == "trace.json"), "what the timeline would have been made of stays"


def test_the_summary_gets_the_room_of_what_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = results.write_summary

    def full(path: Path, summary: Any) -> None:
        if path.with_name("spans.jsonl").exists():
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(path, summary)

    monkeypatch.setattr(results, "write_summary", full)
    summary = train(preflight(load(write_recipe(tmp_path), SHORT)), RememberingConsole())
    assert (summary.status, summary.unwritten) == ("done", {})
    assert read_summary(tmp_path / "runs" / summary.run / "summary.json") == summary


def test_a_folder_that_becomes_read_only_costs_the_results_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers a file system that the kernel remounts after an error: there even removing a file that is not there
    fails."""

    def refused(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    def becomes_read_only(*_: Any) -> None:
        for owner, name in (
            (results, "write_atomic"),
            (results, "write_trace"),
            (results, "append_jsonl"),
            (Path, "unlink"),
        ):
            monkeypatch.setattr(owner, name, refused)
        refused(Path("summary.json"))

    monkeypatch.setattr(results, "write_summary", becomes_read_only)
    console = RememberingConsole()
    summary = train(preflight(load(write_recipe(tmp_path), SHORT)), console)
    monkeypatch.undo()
    assert (summary.status, summary.unwritten) == ("done", dict.fromkeys(RESULTS, "Read-only file system"))
    assert (tmp_path / "runs" / summary.run / "spans.jsonl").is_file()


def test_no_file_can_grow_any_more_and_the_run_ends_in_order(tmp_path: Path) -> None:
    """Covers the limit of the operating system on a file's size, which any of the files that grow may meet."""
    limit = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)); from omni_async.cli import"
        " main; sys.exit(main())"
    )
    arguments = ["train", str(write_recipe(tmp_path)), *QUICK, "checkpoint.every=1000"]
    ended = subprocess.run(
        [sys.executable, "-c", limit, *arguments], capture_output=True, text=True, env=ENVIRONMENT, timeout=60
    )
    assert ended.returncode == 1
    assert "Traceback" not in ended.stdout + ended.stderr
    first = ended.stderr.splitlines()[0]
    assert first.startswith("omni-async: the run failed: ") and "File too large" in first
    (run,) = (tmp_path / "runs").iterdir()
    summary = read_summary(run / "summary.json")
    assert summary.status == "failed" and summary.updates > 0


def test_a_fault_that_cannot_be_recorded_ends_the_run_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(monkeypatch, "faults.jsonl")
    monkeypatch.setattr(session, "_LAST_EVENTS_S", 0.001)
    lost = 0

    async def engine(control: Control) -> None:
        nonlocal lost
        lost += 1
        if lost == 1:
            raise PeerLost("rollout-0 is gone: killed")
        await control.over.wait()

    async def trainer(control: Control) -> None:
        await control.over.wait()

    monkeypatch.setattr(
        runtime, "build_cluster", lambda *_: HandCluster({"trainer": trainer}, workers={"rollout-0": engine})
    )
    summary = train(preflight(write_world(tmp_path)), RememberingConsole())
    assert summary.status == "failed"
    path = tmp_path / "runs" / summary.run / "faults.jsonl"
    assert summary.reason == f"cannot append to {path}: No space left on device"
    assert read_summary(path.with_name("summary.json")) == summary


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl"])
def test_a_line_that_cannot_be_written_ends_the_run_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fill(monkeypatch, name)
    summary = train(preflight(load(write_recipe(tmp_path), QUICK)), RememberingConsole())
    assert summary.status == "failed" and summary.reason is not None
    assert "No space left on device" in summary.reason and "\n" not in summary.reason


def test_a_summary_counts_what_the_ledger_has_though_another_file_cannot_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(monkeypatch, "metrics.jsonl")
    summary = train(preflight(load(write_recipe(tmp_path), QUICK)), RememberingConsole())
    assert summary.status == "failed" and "metrics.jsonl" in (summary.reason or "")
    ledger = (tmp_path / "runs" / summary.run / "ledger.jsonl").read_bytes().splitlines()
    events = Counter(json.loads(line)["event"] for line in ledger)
    counters = summary.counters
    assert (counters.admitted, counters.trained, counters.dropped, counters.live) == (
        len(ledger),
        events["trained"],
        events["dropped"],
        0,
    )
    assert counters.trained == sum(summary.staleness.values()) == 8 * summary.updates


def test_checkpoints_that_cannot_be_written_are_reported_and_the_last_one_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends the run only at the last one, because space may come back while the run goes on."""
    from omni_async.actors import checkpointer

    written = 0

    def sometimes(folder: Path, state: Any) -> None:
        nonlocal written
        written += 1
        if written > 3:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))
        real(folder, state)

    real = checkpointer.write_state
    monkeypatch.setattr(checkpointer, "write_state", sometimes)
    console = RememberingConsole()
    summary = train(preflight(load(write_recipe(tmp_path), [*QUICK, "trainer.updates=12"])), console)
    assert summary.status == "failed" and "No space left on device" in (summary.reason or "")
    assert summary.updates == 12
    assert any("update-000008 could not be written" in phase and "No space" in phase for phase in console.phases)
    (run,) = (tmp_path / "runs").iterdir()
    newest = next(newest_first(run / "checkpoints"))
    require_whole(newest)
    assert newest.name == "update-000006"
