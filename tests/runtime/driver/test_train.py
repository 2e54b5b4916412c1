"""Tests how a run ends: the first cause is kept, every role may finish, and a failure while closing is not lost. A run
that loses a part it needs resumes from its last checkpoint instead."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omni_async.aio.waiting import Stopped, unless
from omni_async.checkpoint import State, folder_name
from omni_async.checkpoint.folders import partial, put_in_place, write_manifest
from omni_async.checkpoint.state import write_state
from omni_async.control.control_state import ControlState
from omni_async.control.events import RunEvent
from omni_async.records.write.attempts import read_faults
from omni_async.records.write.rundir import RunDirectory
from omni_async.records.write.sinks.feed import Sinks
from omni_async.records.write.summary import Summary, read_summary
from omni_async.rewards.base import WrongScorer
from omni_async.roles.inputs import RunInputs
from omni_async.runtime.cluster import PeerLost
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
    update,
    write_ledger,
    write_world,
)
from tests.support.loops import settle
from tests.support.patience import PATIENCE, wait_for


class Job:
    """A run of several clusters, one for each attempt; `inputs` are what each was built from."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.inputs, self.console = folder, list[RunInputs](), RememberingConsole()
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(session, "_LAST_EVENTS_S", PATIENCE)

    def play(self, *clusters: HandCluster, **sections: Any) -> Summary:
        """Runs them and returns the summary, which must also be the one on disk."""

        def build(inputs: RunInputs, run: RunDirectory, attempt: int) -> HandCluster:
            self.inputs.append(inputs)
            assert attempt == len(self.inputs)
            return clusters[attempt - 1]

        lost: list[Any] = []
        patch = self._monkeypatch.setattr
        patch(runtime, "build_cluster", build)
        patch(asyncio.BaseEventLoop, "call_exception_handler", lambda _, context: lost.append(context))
        summary = train(preflight(write_world(self.folder, **sections)), self.console)
        gc.collect(1)
        assert not lost, lost
        assert self.console.closed and all(cluster.closed for cluster in clusters[: len(self.inputs)])
        assert read_summary(self.run.summary) == summary
        return summary

    @property
    def run(self) -> RunDirectory:
        (path,) = (self.folder / "runs").iterdir()
        return RunDirectory(path)

    def dies_after(self, *versions: int, then: Callable[[RunDirectory], Any] = lambda run: None) -> HandCluster:
        """Makes a trainer that dies when it has made these updates, and after `then(run)`."""

        async def dies(control: Control) -> None:
            for version in versions:
                save(self.run.path, version)
            then(self.run)
            raise LOST

        return trainer(dies)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(tmp_path, monkeypatch)


LOST = PeerLost("trainer is gone: killed")


def save(run: Path, version: int) -> None:
    folder = run / "checkpoints" / folder_name(version)
    partial(folder).mkdir(parents=True)
    (run / "ledger.jsonl").unlink(missing_ok=True)
    control = ControlState(version, 2 * version, ledger=write_ledger(run, 2 * version)[-1])
    write_state(partial(folder), State(control, "qwen_image", "flow_grpo", {"optimizer_steps": version}))
    write_manifest(partial(folder))
    put_in_place(folder)


def trainer(role: Role, workers: dict[str, Role] | None = None) -> HandCluster:
    return HandCluster({"trainer": role}, workers=workers)


def broken(error: Exception) -> HandCluster:
    return HandCluster({}, starting=fails(error))


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


@pytest.fixture(params=[signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal whose handling is restored; a process starts with the default, unless under nohup."""
    before = signal.signal(request.param, signal.SIG_DFL)
    yield request.param
    signal.signal(request.param, before)


async def test_a_signal_is_taken_back_from_a_library(number):
    async with interrupts() as interrupted:
        signal.signal(number, signal.SIG_IGN)
        listen(interrupted)
        os.kill(os.getpid(), number)
        await asyncio.wait_for(interrupted.wait(), PATIENCE)


async def test_a_warning_that_was_ignored_at_the_start_stays_ignored(number):
    """As SIGHUP is under nohup. SIGTERM is no warning."""
    signal.signal(number, signal.SIG_IGN)
    async with interrupts() as interrupted:
        os.kill(os.getpid(), number)
        await settle()
        assert interrupted.is_set() == (number == signal.SIGTERM)


async def test_outside_the_main_thread_nothing_is_installed():
    async def main() -> bool:
        async with interrupts() as interrupted:
            return interrupted.is_set()

    assert not await asyncio.to_thread(lambda: asyncio.run(main()))


# ---- a whole run -----------------------------------------------------------------------------------------------------


def test_a_run_that_ends_well(job):
    summary = job.play(HandCluster({"trainer": ends_well}, {"publisher": forever}))
    assert (summary.status, summary.reason) == ("done", None)
    assert summary.cpu_s["driver"] > 0
    left = {"config.yaml", "summary.json", "attempts.jsonl", "trace.json", "samples", "checkpoints"}
    assert {path.name for path in job.run.path.iterdir()} >= left
    assert not job.run.profile.exists(), "nothing was measured"
    assert any(str(job.run.trace) in note for note in job.console.notes)


def test_a_line_precedes_each_wait_of_a_start_without_ray(job, monkeypatch):
    """Building the roles imports the libraries of their models."""
    built: list[int] = []

    class Console(RememberingConsole):
        def phase(self, text: str) -> None:
            super().phase(text)
            built.append(len(job.inputs))

    class Cluster(HandCluster):
        async def start(self) -> None:
            self.tell("trainer: loading its model")

    def open_sinks(*_: Any) -> Sinks:
        wait_for(lambda: "connecting to the trackers" in job.console.phases, "the line about the trackers")
        return Sinks()

    job.console = Console()
    monkeypatch.setattr(runtime, "_open_sinks", open_sinks)
    job.play(Cluster({"trainer": ends_well}), tracking={"mlflow": {"enabled": True}})
    loading = ["loading engines, scorers and the trainer (up to a minute)", "trainer: loading its model"]
    phases = [f"run {job.run.run_id}", *loading, "connecting to the trackers", "generating the first samples"]
    assert [*zip(job.console.phases, built, strict=True)] == [*zip(phases, (0, 0, 1, 1, 1), strict=True)]


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
def test_the_first_failure_is_the_reason(job, where, role, reason):
    roles = {"work": {"rollout-0": until_the_end}, "services": {"publisher": forever}, "start": {}}
    roles[where]["broken"] = role
    summary = job.play(HandCluster(roles["work"], roles["services"], starting=roles["start"].get("broken")))
    assert (summary.status, summary.reason) == ("failed", reason)


def test_last_events_that_cannot_be_recorded_are_a_failure(job):
    async def ends(control: Control) -> None:
        job.run.spans.mkdir()
        control.log.add("closing", {"status": "done", "reason": None})
        control.log.add("spans", {"spans": [Span("trainer", "checkpoint", 1.0, 2.0)]})
        control.end("done")

    summary = job.play(trainer(ends))
    assert summary.status == "failed" and summary.reason is not None
    assert summary.reason.startswith("cannot append to ") and "spans.jsonl" in summary.reason


def test_a_role_that_does_not_finish_is_cancelled(job):
    cancelled: list[str] = []

    async def hangs(control: Control) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append("trainer")

    cluster = HandCluster({"trainer": hangs, "rollout-0": ends_well})
    summary = job.play(cluster, run={"closing_timeout_s": 0.01})
    reason = "the roles were not done run.closing_timeout_s = 0.01 after the run was over"
    assert (summary.status, summary.reason, cancelled) == ("failed", reason, ["trainer"])


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c(job, monkeypatch, times):
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

    summary = job.play(HandCluster({"trainer": trains}, {"publisher": forever}))
    ended = "on request" if times == 1 else "at once, by a second Ctrl-C"
    assert summary.status == "interrupted" and summary.reason.startswith(ended)
    assert job.run.attempts.read_bytes().count(b"\n") == 1
    assert job.run.trace.exists() == (times == 1) == (saved == ["checkpoint"])
    assert any("Ctrl-C again leaves at once, without the checkpoint" in note for note in job.console.notes)
    assert any(note.startswith("leaving at once") for note in job.console.notes) == (times == 2)


def test_signals_while_results_are_written(job, monkeypatch):
    """SIGTERM changes nothing; Ctrl-C skips one file."""
    os_signals = iter([signal.SIGTERM, signal.SIGINT])
    for name in ("write_summary", "write_trace"):
        real = getattr(results, name)

        def signalled(*arguments: Any, real: Any = real) -> None:
            if (number := next(os_signals, None)) is not None:
                os.kill(os.getpid(), number)
            real(*arguments)

        monkeypatch.setattr(results, name, signalled)
    summary = job.play(trainer(ends_well))
    assert (summary.status, summary.unwritten) == ("done", {"trace.json": "skipped on Ctrl-C"})
    assert "  not written: trace.json (skipped on Ctrl-C)" in job.console.notes


def test_ctrl_c_while_models_load(job, monkeypatch):
    """A second one does not wait for a cluster that does not close."""
    monkeypatch.setattr(session, "_SAME_S", 0.0)
    monkeypatch.setattr(runtime, "_SOON_S", 0.01)

    class Stuck(HandCluster):
        async def close(self) -> None:
            self.closed = True
            await interrupted(self.coordinator)

    assert job.play(Stuck({}, starting=interrupted)).status == "interrupted"
    job = Job(job.folder / "loading", monkeypatch)
    summary = job.play(HandCluster({}, starting=interrupted))
    assert (summary.status, summary.reason) == ("interrupted", "before the first update")


def test_a_stop_while_the_roles_are_built(job, monkeypatch):
    """Importing the libraries of their models cannot be interrupted, and nothing waits for it."""
    over, waited = threading.Event(), list[bool]()

    def build(*_: Any) -> HandCluster:
        os.kill(os.getpid(), signal.SIGTERM)
        waited.append(over.wait(PATIENCE))
        return HandCluster({})

    monkeypatch.setattr(runtime, "build_cluster", build)
    summary = train(preflight(write_world(job.folder)), job.console)
    assert (summary.status, summary.reason, waited) == ("interrupted", "before the first update", [])
    over.set()
    assert any(note.startswith("ending while loading engines, scorers") for note in job.console.notes)


def test_a_request_to_stop_is_announced_as_a_signal_is():
    told: list[str] = []
    interruption = session.Interruption(told.append)
    interruption.starting = "starting Ray"
    for _ in range(2):
        interruption.request()
    [line] = told
    assert interruption.is_set() and line.startswith("ending while starting Ray, which is abandoned: no checkpoint")
    interruption = session.Interruption(told.append)
    interruption.starting = None
    interruption.request()
    assert told[1].startswith("ending in order: a checkpoint")


def test_a_failed_start_is_failed_in_trackers(job, monkeypatch):
    calls: list[str] = []
    recording = Sinks([RecordingSink(calls)])
    recording.begin(0)
    monkeypatch.setattr(runtime, "_open_sinks", lambda *_: recording)
    job.play(broken(RuntimeError("no")), tracking={"mlflow": {"enabled": True}})
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


# ---- losses ----------------------------------------------------------------------------------------------------------


def test_a_dead_trainer_resumes_from_the_newest_checkpoint(job):
    summary = job.play(job.dies_after(1, 2), trainer(ends_well))
    assert (summary.status, summary.faults) == ("done", 1)
    _, second = job.inputs
    assert second.start.version == 2 and second.start.ledger.events["trained"] == 4
    assert second.config.checkpoint.resume == str(job.run.checkpoints / folder_name(2))
    assert second.run == job.run.path
    (fault,) = read_faults(job.run.faults)
    assert (fault.part, fault.replacement) == ("trainer", "attempt 2, again from update 2") and fault.seconds >= 0
    assert "trainer is gone: killed; again from update 2" in job.console.notes


def test_unread_updates_of_a_lost_attempt_are_in_the_metrics(job):
    dead = asyncio.Event()

    class Late(Control):
        async def events(self) -> list[RunEvent]:
            await dead.wait()
            await settle()  # by now the driver knows of the death
            return await super().events()

    first = job.dies_after(1, then=lambda run: dead.set())
    first.coordinator = Late()
    first.coordinator.log.add("update", update(1, 0.0, 1.0).data)
    job.play(first, trainer(ends_well))
    assert [line["update"] for line in job.run.read_metrics()] == [1]
    assert job.inputs[1].start.version == 1 and not [n for n in job.console.notes if "warning" in n]


def test_without_a_usable_checkpoint_the_run_ends_and_keeps_all(job):
    """To begin again in the run's folder would remove them. preflight/test_resume.py tests the rules."""

    def damage(run: RunDirectory) -> None:
        run.ledger.write_bytes(b"\n" + run.ledger.read_bytes())

    summary = job.play(job.dies_after(1, then=damage), trainer(ends_well))
    assert (summary.status, len(job.inputs)) == ("failed", 1)
    assert "has no checkpoint to resume from" in (summary.reason or "")
    assert any("line 1 is blank" in note for note in job.console.notes)
    assert (job.run.checkpoints / folder_name(1)).is_dir() and job.run.ledger.read_bytes().startswith(b"\n")


def test_without_a_checkpoint_it_begins_again(job):
    record = {"reward": 0.5, "finished": 3.0}
    first = job.dies_after(then=lambda run: run.append_metrics(1, record))
    assert job.play(first, trainer(ends_well)).status == "done"
    assert job.inputs[1].start == ControlState() and job.inputs[1].config.checkpoint.resume is None
    assert job.run.metrics.read_bytes() == b""
    assert json.loads(job.run.metrics.with_name("metrics.jsonl.void").read_text())["update"] == 1


def test_a_dead_rank_is_found_behind_another_ranks_complaint(job):
    first = trainer(fails(RuntimeError("gloo: connection closed by peer")))
    first.gone = "trainer-1 is gone"
    assert job.play(first, trainer(ends_well)).status == "done"
    assert read_faults(job.run.faults)[0].reason == "trainer-1 is gone"


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_part_that_dies_again_and_again_ends_the_run(job, restarts):
    summary = job.play(*(trainer(fails(LOST)) for _ in range(restarts + 1)), run={"restarts": restarts})
    assert len(job.inputs) == restarts + 1
    assert summary.status == "failed"
    assert "trainer is gone: killed" in summary.reason and "run.restarts" in summary.reason


NO_ROOM, WRONG = RuntimeError("no room"), WrongScorer("scorer 'x': AttributeError: y")


@pytest.mark.parametrize(
    ("clusters", "made", "reason"),
    [
        ([trainer(fails(LOST)), broken(NO_ROOM), trainer(ends_well)], 3, None),
        ([broken(NO_ROOM)], 1, "RuntimeError: no room"),
        ([trainer(fails(LOST)), broken(WRONG), trainer(ends_well)], 2, "scorer 'x': AttributeError: y"),
        ([trainer(fails(ValueError("loss is not finite"))), trainer(ends_well)], 1, "ValueError: loss is not finite"),
        ([trainer(fails_late(LOST)), trainer(ends_well)], 2, None),  # while it writes the last checkpoint
    ],
)
def test_what_is_tried_again(job, clusters, made, reason):
    """Neither a first start that fails, nor a wrong scorer, nor a failure that is no loss."""
    summary = job.play(*clusters)
    assert (summary.reason, len(job.inputs)) == (reason, made)
    assert summary.status == ("done" if reason is None else "failed")


def test_a_signal_while_the_run_is_down_ends_it(job):
    dies = job.dies_after(then=lambda run: os.kill(os.getpid(), signal.SIGTERM))
    summary = job.play(dies, trainer(ends_well))
    assert summary.status in ("failed", "interrupted") and len(job.inputs) == 1


def test_an_engine_that_dies_too_often_ends_the_run_in_order(job):
    saved: list[str] = []

    async def trains(control: Control) -> None:
        await control.over.wait()
        saved.append("checkpoint")

    cluster = trainer(trains, workers={"rollout-0": fails(PeerLost("rollout-0 is gone: killed"))})
    summary = job.play(cluster, run={"restarts": 1})
    assert summary.status == "failed" and "run.restarts" in summary.reason
    assert read_faults(job.run.faults)[0].replacement == "rollout-0.2"
    assert saved == ["checkpoint"] and len(job.inputs) == 1
