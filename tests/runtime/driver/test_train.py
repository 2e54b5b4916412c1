"""Tests how a run ends: the first cause is kept, every role may finish, and a failure while closing is not lost."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from omni_async.aio.waiting import Stopped, unless
from omni_async.records.write.rundir import RunDirectory
from omni_async.records.write.sinks.feed import Sinks
from omni_async.records.write.summary import Summary, read_summary
from omni_async.runtime.driver import results, session
from omni_async.runtime.driver import train as runtime
from omni_async.runtime.driver.session import interrupts, listen
from omni_async.runtime.driver.train import train
from omni_async.runtime.preflight.check import preflight
from omni_async.types import Span
from tests.runtime.runtime_world import (
    Control,
    HandCluster,
    RecordingSink,
    RememberingConsole,
    Role,
    ends_well,
    fails,
    fails_late,
    forever,
    interrupted,
    until_the_end,
    write_world,
)
from tests.support.loops import settle
from tests.support.patience import PATIENCE


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_LAST_EVENTS_S", PATIENCE)


# ---- signals ---------------------------------------------------------------------------------------------------------


def test_repeated_signals_that_are_one(monkeypatch):
    """A second Ctrl-C within a moment, and SIGTERM at any time."""
    monkeypatch.setattr(session, "_SAME_S", PATIENCE)
    interruption = session.Interruption(lambda text: None)
    interruption.signalled(signal.SIGINT)
    interruption.signalled(signal.SIGINT)
    monkeypatch.setattr(session, "_SAME_S", -1.0)  # the moment is over
    interruption.signalled(signal.SIGTERM)
    assert interruption.is_set() and not interruption.at_once.is_set()


async def test_a_signal_is_taken_back_from_a_library():
    async with interrupts() as interrupted:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        listen(interrupted)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(interrupted.wait(), PATIENCE)


async def test_outside_the_main_thread_nothing_is_installed():
    async def main() -> bool:
        async with interrupts() as interrupted:
            return interrupted.is_set()

    assert not await asyncio.to_thread(lambda: asyncio.run(main()))


# ---- a whole run -----------------------------------------------------------------------------------------------------


def play(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    work: dict[str, Role] | HandCluster,
    services: dict[str, Role] | None = None,
    **sections: Any,
) -> tuple[Summary, RememberingConsole]:
    """Runs these roles and returns the summary, which must also be the one on disk."""
    inputs = preflight(write_world(folder, **sections))
    cluster = work if isinstance(work, HandCluster) else HandCluster(work, services)
    console = RememberingConsole()
    monkeypatch.setattr(runtime, "build_cluster", lambda *_: cluster)
    lost: list[Any] = []
    monkeypatch.setattr(asyncio.BaseEventLoop, "call_exception_handler", lambda _, context: lost.append(context))
    summary = train(inputs, console)
    gc.collect(1)
    assert not lost, lost
    assert cluster.closed and console.closed
    assert read_summary(folder / "runs" / summary.run / "summary.json") == summary
    return summary, console


def test_a_run_that_ends_well(tmp_path, monkeypatch):
    summary, console = play(tmp_path, monkeypatch, {"trainer": ends_well}, {"publisher": forever})
    assert (summary.status, summary.reason) == ("done", None)
    folder = tmp_path / "runs" / summary.run
    left = {"config.yaml", "summary.json", "attempts.jsonl", "trace.json", "samples", "checkpoints"}
    assert {path.name for path in folder.iterdir()} >= left
    assert not (folder / "profile.json").exists(), "nothing was measured"
    assert any(str(folder / "trace.json") in note for note in console.notes)


async def saves_after_ctrl_c(control: Control) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    await until_the_end(control)
    raise OSError("no space left on device")


async def stumbles(control: Control) -> None:
    control.end("failed", "rollout-0 holds other weights")
    raise RuntimeError("secondary")


@pytest.mark.parametrize(
    ("where", "role", "reason"),
    [
        ("work", fails(LookupError("its device is lost")), "LookupError: its device is lost"),
        ("services", fails(LookupError("its device is lost")), "LookupError: its device is lost"),
        ("work", fails_late(OSError("no space")), "OSError: no space"),  # for the last checkpoint
        ("work", saves_after_ctrl_c, "OSError: no space left on device"),
        ("work", stumbles, "rollout-0 holds other weights"),
        ("start", fails(RuntimeError("needs 8 GPUs")), "RuntimeError: needs 8 GPUs"),
    ],
)
def test_the_first_failure_is_the_reason(tmp_path, monkeypatch, where, role, reason):
    roles = {"work": {"rollout-0": until_the_end}, "services": {"publisher": forever}, "start": {}}
    roles[where]["broken"] = role
    cluster = HandCluster(roles["work"], roles["services"], starting=roles["start"].get("broken"))
    summary, _ = play(tmp_path, monkeypatch, cluster)
    assert (summary.status, summary.reason) == ("failed", reason)


def test_last_events_that_cannot_be_recorded_are_a_failure(tmp_path, monkeypatch):
    async def ends(control: Control) -> None:
        (run,) = (tmp_path / "runs").iterdir()
        (run / "spans.jsonl").mkdir()
        control.log.add("closing", {"status": "done", "reason": None})
        control.log.add("spans", {"spans": [Span("trainer", "checkpoint", 1.0, 2.0)]})
        control.end("done")

    summary, _ = play(tmp_path, monkeypatch, {"trainer": ends})
    assert summary.status == "failed" and summary.reason is not None
    assert summary.reason.startswith("cannot append to ") and "spans.jsonl" in summary.reason


def test_a_role_that_does_not_finish_is_cancelled(tmp_path, monkeypatch):
    cancelled: list[str] = []

    async def hangs(control: Control) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append("trainer")

    roles = {"trainer": hangs, "rollout-0": ends_well}
    summary, _ = play(tmp_path, monkeypatch, roles, run={"closing_timeout_s": 0.01})
    reason = "the roles were not done run.closing_timeout_s = 0.01 after the run was over"
    assert (summary.status, summary.reason, cancelled) == ("failed", reason, ["trainer"])


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c(tmp_path, monkeypatch, times):
    """The first ends the run in order; the second waits for nothing, and the third is Python's again."""
    monkeypatch.setattr(session, "_SAME_S", 0.0)
    saved: list[str] = []

    async def trains(control: Control) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await until_the_end(control)
        if times == 2:
            os.kill(os.getpid(), signal.SIGINT)
            await settle()
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            await asyncio.Event().wait()
        saved.append("checkpoint")

    summary, console = play(tmp_path, monkeypatch, {"trainer": trains}, {"publisher": forever})
    ended = "on request" if times == 1 else "at once, by a second Ctrl-C"
    assert summary.status == "interrupted" and summary.reason.startswith(ended)
    folder = tmp_path / "runs" / summary.run
    assert (folder / "attempts.jsonl").read_bytes().count(b"\n") == 1
    assert (folder / "trace.json").exists() == (times == 1) == (saved == ["checkpoint"])
    assert any("Ctrl-C again leaves at once, without the checkpoint" in note for note in console.notes)
    assert any(note.startswith("leaving at once") for note in console.notes) == (times == 2)


def test_signals_while_results_are_written(tmp_path, monkeypatch):
    """SIGTERM changes nothing; Ctrl-C skips one file."""
    os_signals = iter([signal.SIGTERM, signal.SIGINT])
    for name in ("write_summary", "write_trace"):
        real = getattr(results, name)

        def signalled(*arguments: Any, real: Any = real) -> None:
            if (number := next(os_signals, None)) is not None:
                os.kill(os.getpid(), number)
            real(*arguments)

        monkeypatch.setattr(results, name, signalled)
    summary, console = play(tmp_path, monkeypatch, {"trainer": ends_well})
    assert (summary.status, summary.unwritten) == ("done", {"trace.json": "skipped on Ctrl-C"})
    assert "  not written: trace.json (skipped on Ctrl-C)" in console.notes


def test_ctrl_c_while_models_load(tmp_path, monkeypatch):
    """A second one does not wait for a cluster that does not close."""
    monkeypatch.setattr(session, "_SAME_S", 0.0)
    monkeypatch.setattr(runtime, "_SOON_S", 0.01)

    class Stuck(HandCluster):
        async def close(self) -> None:
            self.closed = True
            await interrupted(self.coordinator)

    summary, _ = play(tmp_path / "stuck", monkeypatch, Stuck({}, starting=interrupted))
    assert summary.status == "interrupted"
    summary, _ = play(tmp_path / "loading", monkeypatch, HandCluster({}, starting=interrupted))
    assert (summary.status, summary.reason) == ("interrupted", "before the first update")


def test_a_failed_start_is_failed_in_trackers(tmp_path, monkeypatch):
    calls: list[str] = []
    recording = Sinks([RecordingSink(calls)])
    recording.begin(0)
    monkeypatch.setattr(runtime, "_open_sinks", lambda *_: recording)
    cluster = HandCluster({}, starting=fails(RuntimeError("no")))
    play(tmp_path, monkeypatch, cluster, tracking={"mlflow": {"enabled": True}})
    assert calls[-1] == "failed"


async def test_interrupted_work_ends_before_anything_else():
    done, interrupted = list[str](), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # as an actor's start that has something to give back
            done.append("cancelled")

    asyncio.get_running_loop().call_soon(interrupted.set)
    with pytest.raises(Stopped):
        await unless(interrupted.wait(), work())
    assert done == ["cancelled"]


def test_trackers_get_no_credentials(tmp_path, monkeypatch):
    told: list[Any] = []
    monkeypatch.setattr(runtime, "open_sinks", lambda tracking, about, version: told.append(about))
    tracking = {"mlflow": {"enabled": False, "tracking_uri": "http://me:hunter2@h/"}}
    inputs = preflight(write_world(tmp_path, tracking=tracking))
    runtime._open_sinks(inputs, RunDirectory(tmp_path / "run"))
    (about,) = told
    for found in (about.params, about.changed):
        assert "hunter2" not in repr(found) and "http://***@h/" in repr(found)


@pytest.mark.parametrize(
    ("error", "why"), [(OSError("https://me:hunter2@h failed"), "https://***@h failed"), (None, "it takes too long")]
)
async def test_a_cluster_that_is_not_closed_is_reported(error, why, caplog):
    class Cluster:
        async def close(self) -> None:
            if error is not None:
                raise error
            await asyncio.Event().wait()

    await runtime._close_cluster(Cluster(), 0.01)
    assert [record.getMessage() for record in caplog.records] == [f"the cluster was not closed: {why}"]
