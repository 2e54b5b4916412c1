"""Tests that a run that loses a part it needs resumes from its last checkpoint, and that any other failure ends it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omni_async.checkpoint import State, folder_name
from omni_async.checkpoint.folders import partial, put_in_place, write_manifest
from omni_async.checkpoint.state import write_state
from omni_async.control.control_state import ControlState
from omni_async.control.events import RunEvent
from omni_async.records.write.attempts import read_faults
from omni_async.records.write.rundir import RunDirectory
from omni_async.records.write.summary import Summary
from omni_async.rewards.base import WrongScorer
from omni_async.roles.inputs import RunInputs
from omni_async.runtime.cluster import PeerLost
from omni_async.runtime.driver import session
from omni_async.runtime.driver import train as runtime
from omni_async.runtime.driver.train import train
from omni_async.runtime.preflight.check import preflight
from tests.runtime.runtime_world import (
    Control,
    HandCluster,
    RememberingConsole,
    Role,
    ends_well,
    fails,
    fails_late,
    update,
    write_ledger,
    write_world,
)
from tests.support.loops import settle
from tests.support.patience import PATIENCE

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


class Attempts:
    """A run of several clusters, one for each attempt; `inputs` are what each was built from."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.inputs, self.console = folder, list[RunInputs](), RememberingConsole()
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(session, "_LAST_EVENTS_S", PATIENCE)

    def play(self, *clusters: HandCluster, **sections: Any) -> Summary:
        def build(inputs: RunInputs, run: RunDirectory, attempt: int) -> HandCluster:
            self.inputs.append(inputs)
            assert attempt == len(self.inputs)
            return clusters[attempt - 1]

        self._monkeypatch.setattr(runtime, "build_cluster", build)
        summary = train(preflight(write_world(self.folder, **sections)), self.console)
        assert all(cluster.closed for cluster in clusters[: len(self.inputs)])
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
def attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempts:
    return Attempts(tmp_path, monkeypatch)


def test_a_dead_trainer_resumes_from_the_newest_checkpoint(attempts):
    summary = attempts.play(attempts.dies_after(1, 2), trainer(ends_well))
    assert (summary.status, summary.faults) == ("done", 1)
    _, second = attempts.inputs
    assert second.start.version == 2 and second.start.ledger.events["trained"] == 4
    assert second.config.checkpoint.resume == str(attempts.run.checkpoints / folder_name(2))
    assert second.run == attempts.run.path
    (fault,) = read_faults(attempts.run.faults)
    assert (fault.part, fault.replacement) == ("trainer", "attempt 2, again from update 2") and fault.seconds >= 0
    assert "trainer is gone: killed; again from update 2" in attempts.console.notes


def test_unread_updates_of_a_lost_attempt_are_in_the_metrics(attempts):
    dead = asyncio.Event()

    class Late(Control):
        async def events(self) -> list[RunEvent]:
            await dead.wait()
            await settle()  # by now the driver knows of the death
            return await super().events()

    first = attempts.dies_after(1, then=lambda run: dead.set())
    first.coordinator = Late()
    first.coordinator.log.add("update", update(1, 0.0, 1.0).data)
    attempts.play(first, trainer(ends_well))
    assert [line["update"] for line in attempts.run.read_metrics()] == [1]
    assert attempts.inputs[1].start.version == 1 and not [n for n in attempts.console.notes if "warning" in n]


def test_without_a_usable_checkpoint_the_run_ends_and_keeps_all(attempts):
    """To begin again in the run's folder would remove them. What may be used is tested in preflight/test_resume.py."""

    def damage(run: RunDirectory) -> None:
        run.ledger.write_bytes(b"\n" + run.ledger.read_bytes())

    summary = attempts.play(attempts.dies_after(1, then=damage), trainer(ends_well))
    assert (summary.status, len(attempts.inputs)) == ("failed", 1)
    assert "has no checkpoint to resume from" in (summary.reason or "")
    assert any("line 1 is blank" in note for note in attempts.console.notes)
    assert (attempts.run.checkpoints / folder_name(1)).is_dir() and attempts.run.ledger.read_bytes().startswith(b"\n")


def test_without_a_checkpoint_it_begins_again(attempts):
    record = {"reward": 0.5, "finished": 3.0}
    first = attempts.dies_after(then=lambda run: run.append_metrics(1, record))
    assert attempts.play(first, trainer(ends_well)).status == "done"
    assert attempts.inputs[1].start == ControlState() and attempts.inputs[1].config.checkpoint.resume is None
    assert attempts.run.metrics.read_bytes() == b""
    assert json.loads(attempts.run.metrics.with_name("metrics.jsonl.void").read_text())["update"] == 1


def test_a_dead_rank_is_found_behind_another_ranks_complaint(attempts):
    first = trainer(fails(RuntimeError("gloo: connection closed by peer")))
    first.gone = "trainer-1 is gone"
    assert attempts.play(first, trainer(ends_well)).status == "done"
    assert read_faults(attempts.run.faults)[0].reason == "trainer-1 is gone"


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_part_that_dies_again_and_again_ends_the_run(attempts, restarts):
    summary = attempts.play(*(trainer(fails(LOST)) for _ in range(restarts + 1)), run={"restarts": restarts})
    assert len(attempts.inputs) == restarts + 1
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
def test_what_is_tried_again(attempts, clusters, made, reason):
    """Neither a first start that fails, nor a wrong scorer, nor a failure that is no loss."""
    summary = attempts.play(*clusters)
    assert (summary.reason, len(attempts.inputs)) == (reason, made)
    assert summary.status == ("done" if reason is None else "failed")


def test_a_signal_while_the_run_is_down_ends_it(attempts):
    dies = attempts.dies_after(then=lambda run: os.kill(os.getpid(), signal.SIGTERM))
    summary = attempts.play(dies, trainer(ends_well))
    assert summary.status in ("failed", "interrupted") and len(attempts.inputs) == 1


def test_an_engine_that_dies_too_often_ends_the_run_in_order(attempts):
    saved: list[str] = []

    async def trains(control: Control) -> None:
        await control.over.wait()
        saved.append("checkpoint")

    cluster = trainer(trains, workers={"rollout-0": fails(PeerLost("rollout-0 is gone: killed"))})
    summary = attempts.play(cluster, run={"restarts": 1})
    assert summary.status == "failed" and "run.restarts" in summary.reason
    assert read_faults(attempts.run.faults)[0].replacement == "rollout-0.2"
    assert saved == ["checkpoint"] and len(attempts.inputs) == 1
