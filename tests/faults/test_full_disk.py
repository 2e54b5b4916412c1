"""Tests that a run without space left on the device ends soon, says so in one line, and keeps the checkpoint it has."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

import pytest

from omni_async import cli
from omni_async.aio.clock import Clock
from omni_async.checkpoint.folders import newest_first, require_whole
from omni_async.config import Config, load, writing
from omni_async.records.read.trace_file import read_trace
from omni_async.records.write.rundir import RunDirectory
from omni_async.records.write.summary import Summary, read_summary
from omni_async.roles import checkpointer
from omni_async.runtime.cluster import PeerLost
from omni_async.runtime.driver import results, session
from omni_async.runtime.driver import train as runtime
from omni_async.runtime.driver.train import train
from omni_async.runtime.preflight.check import preflight
from tests.runtime.runtime_world import HandCluster, RememberingConsole, fails, until_the_end, write_world
from tests.support.job_world import ENVIRONMENT, write_emulated
from tests.support.patience import PATIENCE

SHORT = ["emulation.time_scale=0.001", "trainer.updates=4"]
LONG = ["emulation.time_scale=0.001", "trainer.updates=400", "checkpoint.every=2", "run.restarts=2"]
RESULTS = {"summary.json", "profile.json", "trace.json", "attempts.jsonl"}


_ON_A_FULL_DEVICE: set[Path] = set()


def no_space(path: Path) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


def full(path: Path) -> None:
    """Make every append to a file fail with a full device."""
    _ON_A_FULL_DEVICE.add(path)


def obstructed(path: Path) -> None:
    """Makes it impossible to rename a file to this, its final path."""
    (path / "in the way").mkdir(parents=True)


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Path], None], str], None]:
    """Spoils a file of the run's folder as soon as there is one."""
    create, open_kept = RunDirectory.create, writing._open_kept
    _ON_A_FULL_DEVICE.clear()

    def opened(path: Path, flags: int) -> FileIO:
        return FileIO("/dev/full", "a") if path in _ON_A_FULL_DEVICE else open_kept(path, flags)

    def spoil_in_the_run_folder(how: Callable[[Path], None], name: str) -> None:
        def created(config: Config, clock: Clock) -> RunDirectory:
            run = create(config, clock)
            how(run.path / name)
            return run

        monkeypatch.setattr(RunDirectory, "create", created)

    monkeypatch.setattr(writing, "_open_kept", opened)
    return spoil_in_the_run_folder


def emulated(folder: Path, overrides: list[str], console: RememberingConsole | None = None) -> tuple[Summary, Path]:
    """Returns the summary of a run in the folder, and its own folder."""
    summary = train(preflight(load(write_emulated(folder), overrides)), console or RememberingConsole())
    return summary, folder / "runs" / summary.run


# ---- what is written at the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", sorted(RESULTS))
def test_a_result_that_cannot_be_written_costs_no_other(tmp_path, spoil, capsys, lost):
    spoil(obstructed, lost)
    assert cli.main(["train", str(write_emulated(tmp_path)), *SHORT]) == 1
    said = capsys.readouterr()
    assert said.err == f"omni-async: not everything could be written: {lost} (Is a directory)\n"
    assert f"not written: {lost} (Is a directory)" in said.out
    (run,) = (tmp_path / "runs").iterdir()
    assert all((run / name).is_file() for name in RESULTS - {lost})
    if lost != "summary.json":
        summary = read_summary(run / "summary.json")
        assert (summary.status, summary.unwritten) == ("done", {lost: "Is a directory"})
    assert (run / "spans.jsonl").exists() == (lost == "trace.json"), "what the timeline would have been made of stays"


def test_the_summary_gets_the_room_of_the_spans(tmp_path, monkeypatch):
    real = results.write_summary

    def while_spans_are_there(path: Path, summary: Any) -> None:
        if path.with_name("spans.jsonl").exists():
            no_space(path)
        real(path, summary)

    monkeypatch.setattr(results, "write_summary", while_spans_are_there)
    monkeypatch.setattr(results, "MOST_MEASURED", 60)
    summary, run = emulated(tmp_path, SHORT)
    assert (summary.status, summary.unwritten) == ("done", {})
    assert read_summary(run / "summary.json") == summary
    assert len([*read_trace(run / "trace.json")]) == 60, "the newest, which were in memory"


def test_a_folder_that_becomes_read_only(tmp_path, monkeypatch):
    """As the kernel remounts a file system after an error: even removing a missing file fails there."""

    def refused(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    def becomes_read_only(*_: Any) -> None:
        for name in ("write_atomic", "write_trace", "append_jsonl"):
            monkeypatch.setattr(results, name, refused)
        monkeypatch.setattr(Path, "unlink", refused)
        refused(Path("summary.json"))

    monkeypatch.setattr(results, "write_summary", becomes_read_only)
    summary, run = emulated(tmp_path, SHORT)
    monkeypatch.undo()
    assert (summary.status, summary.unwritten) == ("done", dict.fromkeys(RESULTS, "Read-only file system"))
    assert (run / "spans.jsonl").is_file()


# ---- what is written all the time ------------------------------------------------------------------------------------


def test_files_that_cannot_grow(tmp_path):
    code = "import resource as r, sys; r.setrlimit(r.RLIMIT_FSIZE, (60_000, 60_000)); from omni_async import cli"
    command = [sys.executable, "-c", f"{code}; sys.exit(cli.main())", "train", str(write_emulated(tmp_path)), *LONG]
    command += ["checkpoint.every=1000"]
    ended = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=PATIENCE)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stdout + ended.stderr
    first = ended.stderr.splitlines()[0]
    assert first.startswith("omni-async: the run failed: ") and "File too large" in first
    (run,) = (tmp_path / "runs").iterdir()
    summary = read_summary(run / "summary.json")
    assert summary.status == "failed" and summary.updates > 0


def test_a_fault_that_cannot_be_recorded(tmp_path, monkeypatch, spoil):
    spoil(full, "faults.jsonl")
    monkeypatch.setattr(session, "_LAST_EVENTS_S", 0.001)
    engine = fails(PeerLost("rollout-0 is gone: killed"))
    cluster = HandCluster({"trainer": until_the_end}, workers={"rollout-0": engine})
    monkeypatch.setattr(runtime, "build_cluster", lambda *_: cluster)
    summary = train(preflight(write_world(tmp_path)), RememberingConsole())
    path = tmp_path / "runs" / summary.run / "faults.jsonl"
    assert (summary.status, summary.reason) == ("failed", f"cannot append to {path}: No space left on device")
    assert read_summary(path.with_name("summary.json")) == summary


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl"])
def test_a_line_that_cannot_be_written(tmp_path, spoil, name):
    spoil(full, name)
    summary, run = emulated(tmp_path, LONG)
    assert summary.status == "failed" and summary.reason is not None
    assert name.removesuffix(".jsonl") in summary.reason and "No space left on device" in summary.reason
    assert "\n" not in summary.reason
    if name == "metrics.jsonl":
        events = Counter(json.loads(line)["event"] for line in (run / "ledger.jsonl").read_bytes().splitlines())
        counters = summary.counters
        assert (counters.admitted, counters.live) == (events.total(), 0)
        assert (counters.trained, counters.dropped) == (events["trained"], events["dropped"])
        assert counters.trained == sum(summary.staleness.values()) == 8 * summary.updates


def test_checkpoints_that_cannot_be_written(tmp_path, monkeypatch):
    """Only the last one ends the run, because space may come back."""
    written, real = 0, checkpointer.write_state

    def sometimes(folder: Path, state: Any) -> None:
        nonlocal written
        written += 1
        if written > 3:
            no_space(folder)
        real(folder, state)

    monkeypatch.setattr(checkpointer, "write_state", sometimes)
    console = RememberingConsole()
    summary, run = emulated(tmp_path, [*LONG, "trainer.updates=12"], console)
    assert (summary.status, summary.updates) == ("failed", 12) and "No space left on device" in (summary.reason or "")
    assert any("update-000008 could not be written" in phase and "No space" in phase for phase in console.phases)
    newest = next(newest_first(run / "checkpoints"))
    require_whole(newest)
    assert newest.name == "update-000006"
