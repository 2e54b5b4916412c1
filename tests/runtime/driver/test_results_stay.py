"""Tests, on resumed emulated runs, that only an attempt with something to record changes what a run has left."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from omni_async import cli
from omni_async.commands.operate import left_behind
from omni_async.config import load
from omni_async.control.plane import ControlPlane
from omni_async.performance.profile import ServiceTime, write_profile
from omni_async.records.read.record import read_run
from omni_async.records.write import rundir
from omni_async.records.write.attempts import Attempt
from omni_async.records.write.files import read_records
from omni_async.records.write.ledger_file import JsonlSink
from omni_async.records.write.rundir import RunDirectory, RunDirectoryError
from omni_async.records.write.sinks.base import SinkUnusableError
from omni_async.records.write.sinks.feed import Sinks
from omni_async.records.write.summary import Summary, read_summary
from omni_async.runtime.driver import train as runtime
from omni_async.runtime.driver.train import train
from omni_async.runtime.preflight.check import preflight
from tests.runtime.runtime_world import HandCluster, RecordingSink, RememberingConsole, Role, fails
from tests.runtime.runtime_world import interrupted as is_interrupted
from tests.support.job_world import PROFILE, write_emulated

QUICK = ("emulation.time_scale=0.001", "trainer.updates=6", "checkpoint.every=2")


class Job:
    """A recipe that is run attempt after attempt."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.recipe, self.overrides = write_emulated(folder), (*QUICK, *overrides)
        self.console = RememberingConsole()

    def attempt(self, *overrides: str, watch: Callable[[Any], None] = lambda view: None) -> Summary:
        """`watch` gets every update."""

        class Console(RememberingConsole):
            def update(self, view: Any) -> None:
                super().update(view)
                watch(view)

        self.console = Console()
        resume = [f"checkpoint.resume={self.run.path}"] if self._runs() else []
        return train(preflight(load(self.recipe, [*self.overrides, *resume, *overrides])), self.console)

    def command(self, run: Path, *overrides: str) -> int:
        return cli.main(["train", str(self.recipe), *self.overrides, f"checkpoint.resume={run}", *overrides])

    def _runs(self) -> list[Path]:
        return [*(self.recipe.parent / "runs").glob("emulated-*")]

    @property
    def run(self) -> RunDirectory:
        (path,) = self._runs()
        return RunDirectory(path)

    @property
    def attempts(self) -> list[Attempt]:
        return read_records(self.run.attempts, Attempt)

    def files(self) -> dict[str, bytes]:
        """Reads every file but the list of attempts."""
        found = {path for path in self.run.path.rglob("*") if path.is_file()} - {
            self.run.attempts,
            *self.run.logs.iterdir(),
        }
        return {str(path.relative_to(self.run.path)): path.read_bytes() for path in found}

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run.path / name).read_bytes().splitlines()]

    def require_whole(self, updates: int, groups: int = 8) -> None:
        """Requires that every group ended once, and every update was made once, of its groups, and has a line."""
        ledger = self.lines("ledger.jsonl")
        assert sorted(line["group"] for line in ledger) == [*range(len(ledger))]
        trained = [line["trained_version"] for line in ledger if line["event"] == "trained"]
        made = [*range(1, updates + 1)]
        assert sorted(trained) == sorted(made * groups)
        assert [line["update"] for line in self.lines("metrics.jsonl") if "finished" in line] == made


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.fixture
def interrupted(job: Job) -> Job:
    """Stops the job in the middle of its updates."""
    summary = job.attempt(watch=lambda view: view["update"] == 3 and os.kill(os.getpid(), signal.SIGINT))
    assert summary.status == "interrupted"
    return job


def loading(monkeypatch: pytest.MonkeyPatch, role: Role = is_interrupted) -> None:
    """Interrupts the next attempt while it loads, or lets something else happen."""
    monkeypatch.setattr(runtime, "build_cluster", lambda *_: HandCluster({}, starting=role))


def test_an_attempt_that_ends_while_it_loads_leaves_only_a_line(interrupted, monkeypatch):
    before, first = interrupted.files(), read_summary(interrupted.run.summary)
    loading(monkeypatch)
    summary = interrupted.attempt()
    assert summary.status == "interrupted" and summary.updates == first.updates >= 3
    assert interrupted.files() == before
    (ended, was_there), made = interrupted.attempts, first.updates
    assert (ended.from_update, ended.to_update, ended.status) == (0, made, "interrupted")
    assert (was_there.from_update, was_there.to_update, was_there.reason) == (made, made, "before the first update")
    assert ended.began < ended.ended <= was_there.began < was_there.ended
    assert any("made no update" in note and "is as it was" in note for note in interrupted.console.notes)
    loading(monkeypatch, fails(RuntimeError("no room")))
    assert interrupted.attempt().status == "failed"
    assert interrupted.files() == before and interrupted.attempts[-1].reason == "RuntimeError: no room"


def test_readers_know_where_an_attempt_resumes_before_its_first_update(interrupted, monkeypatch):
    run, seen = interrupted.run, list[tuple[int, ...]]()
    made = len(read_run(run.path).updates)
    for path in run.checkpoints.iterdir():
        if path.name > "update-000002":
            shutil.rmtree(path)

    async def read(control: Any) -> None:
        found = read_run(run.path)
        seen.append((len(found.updates), sum(one.event == "trained" for one in found.ledger)))
        seen.append((left_behind(run.path).update,))
        await is_interrupted(control)

    with monkeypatch.context() as patched:
        loading(patched, read)
        interrupted.attempt()
    assert seen == [(2, 16), (2,)] and len(read_run(run.path).updates) == made >= 3
    after = list[int]()
    interrupted.attempt(watch=lambda view: after.append(len(read_run(run.path).updates)))
    assert after[-1] == 6 and after == [*range(3, 7)]


def test_an_interruption_between_loading_and_the_first_update_changes_nothing(interrupted, monkeypatch):
    """Drops the groups under way, which are not in the ledger and are generated again."""
    admit = ControlPlane._admit

    def admit_and_interrupt(plane: ControlPlane) -> None:
        admit(plane)
        if plane.ledger.live:
            os.kill(os.getpid(), signal.SIGINT)

    before, slow = interrupted.files(), interrupted.recipe.with_name("slow.json")
    write_profile(slow, replace(PROFILE, generate=ServiceTime(fixed_s=500.0)))
    with monkeypatch.context() as patched:
        patched.setattr(ControlPlane, "_admit", admit_and_interrupt)
        summary = interrupted.attempt(f"emulation.profile={slow}")
    assert summary.status == "interrupted" and summary.counters.dropped > 0 and summary.conserved
    assert interrupted.files() == before
    assert interrupted.attempt().status == "done"
    interrupted.require_whole(6)


def test_a_folder_that_cannot_be_taken_over(interrupted, monkeypatch):
    def full(*_: Any) -> None:
        raise RunDirectoryError("cannot go on: No space left on device")

    monkeypatch.setattr(RunDirectory, "take_over", full)
    assert interrupted.attempt().status == "failed"
    assert not any("made no update" in note for note in interrupted.console.notes)
    assert any("are in the ledger and checkpoints" in note for note in interrupted.console.notes)


def test_a_resumed_run_counts_all_its_attempts(interrupted):
    """The summary of the attempts before is aside meanwhile."""
    run, first, seen = interrupted.run, read_summary(interrupted.run.summary), list[tuple[bool, Summary]]()
    summary = interrupted.attempt(watch=lambda _: seen.append((run.summary.exists(), read_summary(run.former_summary))))
    assert seen and all(one == (False, first) for one in seen)
    assert (summary.status, summary.updates, summary.conserved) == ("done", 6, True)
    first_line, second_line = interrupted.attempts
    assert first_line.wall_s == first.wall_s < summary.wall_s == second_line.wall_s
    assert summary.wall_s < first.wall_s + second_line.ended - second_line.began
    assert summary.images_per_s == pytest.approx(summary.images / summary.wall_s)
    walls = [line["wall_s"] for line in interrupted.lines("metrics.jsonl") if "finished" in line]
    assert walls == sorted(walls) and walls[first.updates] > first.wall_s
    interrupted.require_whole(6)
    assert not run.former_summary.exists() and not run.spans.exists()


def test_a_finished_run(job, capsys, monkeypatch):
    """Resumed as it is, it keeps its results; a summary that it lacks is written; and it may be trained further."""
    first = job.attempt()
    assert first.status == "done"
    before, attempts = job.files(), job.run.attempts.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(runtime, "build_cluster", lambda *_: pytest.fail("built a cluster"))
        assert job.command(job.run.path) == 0
    said = capsys.readouterr()
    assert "done, nothing to do" in said.out and "trainer.updates=N" in said.out and said.err == ""
    assert job.files() == before and job.run.attempts.read_bytes() == attempts
    assert job.attempt().status == "done"
    assert job.files() == before

    job.run.summary.unlink()  # as if it had been killed after its last update
    again = job.attempt()
    assert read_summary(job.run.summary) == again
    assert (again.status, again.updates, again.counters) == ("done", 6, first.counters)
    after = job.files()
    assert all(after[name] == before[name] for name in ("trace.json", "profile.json")), "of the updates' attempt"

    job.run.summary.unlink()
    job.run.summary.mkdir()  # put aside, it cannot be removed, which costs nothing else
    summary = job.attempt("trainer.updates=8")
    assert (summary.status, summary.updates, summary.unwritten) == ("done", 8, {}) and summary.wall_s > first.wall_s
    assert read_summary(job.run.summary).status == "done"
    job.require_whole(8)


def test_a_run_from_anothers_checkpoint_counts_its_updates_from_there(job, capsys, monkeypatch):
    job.attempt()
    first, checkpoint = job.run.path, job.run.checkpoints / "update-000004"
    train(preflight(load(job.recipe, [*job.overrides, f"checkpoint.resume={checkpoint}"])), RememberingConsole())
    (other,) = {*job._runs()} - {first}
    (attempt,) = read_records(RunDirectory(other).attempts, Attempt)
    assert (attempt.from_update, attempt.to_update) == (4, 6)
    monkeypatch.setattr(runtime, "build_cluster", lambda *_: pytest.fail("built a cluster"))
    assert job.command(other) == 0
    assert "is done, nothing to do" in capsys.readouterr().out
    assert job.command(other, "trainer.updates=2") == 2
    assert "beyond trainer.updates = 2" in capsys.readouterr().err


STEPS = (
    *((RunDirectory, name) for name in ("void_metrics", "take_over", "append_metrics")),
    *((JsonlSink, "_open"), (JsonlSink, "_write"), (rundir, "write_atomic"), (Path, "replace")),
)


def killed_at(moment: int, *overrides: str, job: Job) -> bool:
    """Runs an attempt in a process that kills itself at its nth write, and returns whether it came to that."""
    child = os.fork()
    if child == 0:
        try:
            left = iter(range(moment - 1, -1, -1))

            def stepwise(work: Callable[..., Any]) -> Callable[..., Any]:
                def wrapped(*arguments: Any, **options: Any) -> Any:
                    if next(left, None) == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return work(*arguments, **options)

                return wrapped

            for owner, name in STEPS:
                setattr(owner, name, stepwise(getattr(owner, name)))
            job.attempt(*overrides)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_a_kill_at_any_moment_of_the_take_over(tmp_path):
    """Begins where an attempt was killed after a checkpoint: lines of ledger and metrics are void."""
    job = Job(tmp_path, "trainer.groups_per_update=2")
    assert killed_at(25, "checkpoint.every=1", job=job)
    assert [path.name for path in job.run.checkpoints.glob("update-*")], "there is something to go on from"
    folder, left = job.run.path, tmp_path / "left"
    shutil.copytree(folder, left, ignore=shutil.ignore_patterns("control.sock"))
    for moment in range(1, 16):  # an attempt has about as many; how many lines one writing takes is a matter of time
        killed = killed_at(moment, job=job)
        assert killed or moment > 10
        if killed:
            assert job.attempt().status == "done"
        job.require_whole(6, groups=2)
        shutil.rmtree(folder)
        shutil.copytree(left, folder)


def test_trackers_hear_of_an_attempt_with_an_update(interrupted, monkeypatch):
    """Where a tracker cannot be used, nothing changes."""

    def refuse(*_: Any) -> None:
        raise SinkUnusableError("tracking.mlflow: cannot use http://nowhere")

    before, calls = interrupted.files(), list[str]()
    monkeypatch.setattr(runtime, "_open_sinks", refuse)
    with pytest.raises(SinkUnusableError):
        interrupted.attempt("tracking.mlflow.enabled=true")
    assert interrupted.files() == before
    monkeypatch.setattr(runtime, "_open_sinks", lambda *_: Sinks([RecordingSink(calls)]))
    with monkeypatch.context() as patched:
        loading(patched)
        interrupted.attempt("tracking.mlflow.enabled=true")
    assert calls == []
    interrupted.attempt("tracking.mlflow.enabled=true")
    assert calls[0].startswith("begin ") and calls[1] == "metrics"
    assert calls[-5:] == ["config.yaml", "summary.json", "profile.json", "trace.json", "done"]
