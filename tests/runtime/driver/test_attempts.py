"""Tests that a run that loses a part it needs goes on from its last checkpoint, and that any other failure ends it."""

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
    until_the_end,
    update,
    write_ledger,
    write_world,
)
from tests.support.loops import settle
from tests.support.patience import PATIENCE


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_LAST_EVENTS_S", PATIENCE)


def save(run: Path, version: int) -> Path:
    folder = run / "checkpoints" / folder_name(version)
    written = partial(folder)
    written.mkdir(parents=True)
    (run / "ledger.jsonl").unlink(missing_ok=True)
    control = ControlState(version, 2 * version, ledger=write_ledger(run, 2 * version)[-1])
    write_state(written, State(control, "qwen_image", "flow_grpo", {"optimizer_steps": version}))
    write_manifest(written)
    put_in_place(folder)
    return folder


class Attempts:
    """A run of several clusters, one for each attempt; `inputs` are what each was built from."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *clusters: HandCluster, **sections: Any) -> None:
        self.folder, self.clusters, self.inputs = folder, clusters, list[RunInputs]()
        self.console = RememberingConsole()
        monkeypatch.setattr(runtime, "build_cluster", self.build)
        self.summary: Summary = train(preflight(write_world(folder, **sections)), self.console)
        self.run = RunDirectory(folder / "runs" / self.summary.run)
        assert all(cluster.closed for cluster in clusters[: len(self.inputs)])

    def build(self, inputs: RunInputs, run: RunDirectory, attempt: int) -> HandCluster:
        self.inputs.append(inputs)
        assert attempt == len(self.inputs)
        return self.clusters[attempt - 1]


def trainer(role: Role, workers: dict[str, Role] | None = None) -> HandCluster:
    return HandCluster({"trainer": role}, workers=workers)


LOST = PeerLost("trainer is gone: killed")


def dies_after(folder: Path, *versions: int, then: Callable[[Path], Any] = lambda run: None) -> Role:
    """Makes a trainer that dies when it has made these updates, and after `then(run)`."""

    async def dies(control: Control) -> None:
        (run,) = (folder / "runs").iterdir()
        for version in versions:
            save(run, version)
        then(run)
        raise LOST

    return dies


def test_after_the_trainers_death_the_run_goes_on_from_the_newest_checkpoint(tmp_path, monkeypatch):
    attempts = Attempts(tmp_path, monkeypatch, trainer(dies_after(tmp_path, 1, 2)), trainer(ends_well))
    assert (attempts.summary.status, attempts.summary.faults) == ("done", 1)
    _, second = attempts.inputs
    assert second.start.version == 2 and second.start.ledger.events["trained"] == 4
    assert second.config.checkpoint.resume == str(attempts.run.checkpoints / folder_name(2))
    assert second.run == attempts.run.path
    (fault,) = read_faults(attempts.run.faults)
    assert (fault.part, fault.replacement) == ("trainer", "attempt 2, again from update 2") and fault.seconds >= 0
    assert "trainer is gone: killed; again from update 2" in attempts.console.notes


def test_the_updates_of_a_lost_attempt_whose_events_nobody_had_read_are_in_the_metrics(tmp_path, monkeypatch):
    dead = asyncio.Event()

    class Late(Control):
        async def events(self) -> list[RunEvent]:
            await dead.wait()
            await settle()  # by now the driver knows of the death
            return await super().events()

    async def dies(control: Control) -> None:
        control.log.add("update", update(1, 0.0, 1.0).data)
        dead.set()
        await dies_after(tmp_path, 1)(control)

    first = trainer(dies)
    first.coordinator = Late()
    attempts = Attempts(tmp_path, monkeypatch, first, trainer(ends_well))
    assert [line["update"] for line in attempts.run.read_metrics()] == [1]
    assert attempts.inputs[1].start.version == 1 and not [n for n in attempts.console.notes if "warning" in n]


def test_a_damaged_checkpoint_is_passed_over_and_where_none_can_be_used_the_run_ends_and_leaves_them(
    tmp_path, monkeypatch
):
    """Keeps the checkpoints: to begin again from the start in the run's folder would remove them."""

    def damage(run: Path) -> None:
        (run / "checkpoints" / folder_name(2) / "state.json").write_text("{}")

    def damage_all(run: Path) -> None:
        (run / "ledger.jsonl").write_bytes(b"\n" + (run / "ledger.jsonl").read_bytes())

    folder = tmp_path / "one"
    attempts = Attempts(folder, monkeypatch, trainer(dies_after(folder, 1, 2, then=damage)), trainer(ends_well))
    assert attempts.inputs[1].start.version == 1
    assert any(note.startswith("warning: not resumed from update-000002") for note in attempts.console.notes)
    folder = tmp_path / "all"
    attempts = Attempts(folder, monkeypatch, trainer(dies_after(folder, 1, then=damage_all)), trainer(ends_well))
    assert (attempts.summary.status, len(attempts.inputs)) == ("failed", 1)
    assert "has no checkpoint to resume from" in (attempts.summary.reason or "")
    assert any("line 1 is blank" in note for note in attempts.console.notes)
    assert (attempts.run.checkpoints / folder_name(1)).is_dir() and attempts.run.ledger.read_bytes().startswith(b"\n")


def test_without_a_checkpoint_it_begins_again_and_what_was_written_is_void(tmp_path, monkeypatch):
    def record(run: Path) -> None:
        RunDirectory(run).append_metrics(1, {"reward": 0.5, "finished": 3.0})

    attempts = Attempts(tmp_path, monkeypatch, trainer(dies_after(tmp_path, then=record)), trainer(ends_well))
    assert attempts.summary.status == "done"
    assert attempts.inputs[1].start == ControlState() and attempts.inputs[1].config.checkpoint.resume is None
    assert attempts.run.metrics.read_bytes() == b""
    assert json.loads(attempts.run.metrics.with_name("metrics.jsonl.void").read_text())["update"] == 1


def test_a_rank_that_died_is_found_behind_another_ranks_complaint(tmp_path, monkeypatch):
    first = trainer(fails(RuntimeError("gloo: connection closed by peer")))
    first.gone = "trainer-1 is gone"
    attempts = Attempts(tmp_path, monkeypatch, first, trainer(ends_well))
    assert attempts.summary.status == "done"
    assert read_faults(attempts.run.faults)[0].reason == "trainer-1 is gone"


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_part_that_dies_again_and_again_ends_the_run_with_the_reason(tmp_path, monkeypatch, restarts):
    clusters = [trainer(fails(LOST)) for _ in range(restarts + 1)]
    attempts = Attempts(tmp_path, monkeypatch, *clusters, run={"restarts": restarts})
    assert len(attempts.inputs) == restarts + 1
    assert attempts.summary.status == "failed"
    assert "trainer is gone: killed" in attempts.summary.reason and "run.restarts" in attempts.summary.reason


def test_an_attempt_that_does_not_start_is_tried_again_unless_it_is_the_first_or_its_scorer_is_wrong(
    tmp_path, monkeypatch
):
    def broken(error: Exception) -> HandCluster:
        return HandCluster({}, starting=fails(error))

    first, last, no_room = trainer(fails(LOST)), trainer(ends_well), RuntimeError("no room")
    attempts = Attempts(tmp_path / "a", monkeypatch, first, broken(no_room), last)
    assert attempts.summary.status == "done" and len(attempts.inputs) == 3
    for name, clusters, reason in (
        ("b", [broken(no_room)], "RuntimeError: no room"),
        ("c", [first, broken(WrongScorer("scorer 'x': AttributeError: y")), last], "scorer 'x': AttributeError: y"),
        ("d", [trainer(fails(ValueError("loss is not finite"))), last], "ValueError: loss is not finite"),
    ):
        attempts = Attempts(tmp_path / name, monkeypatch, *clusters)
        assert (attempts.summary.status, attempts.summary.reason) == ("failed", reason)
        assert len(attempts.inputs) == (2 if name == "c" else 1)


def test_a_signal_while_the_run_is_down_ends_it(tmp_path, monkeypatch):
    dies = dies_after(tmp_path, then=lambda run: os.kill(os.getpid(), signal.SIGTERM))
    attempts = Attempts(tmp_path, monkeypatch, trainer(dies), trainer(ends_well))
    assert attempts.summary.status in ("failed", "interrupted") and len(attempts.inputs) == 1


def test_a_lost_engine_does_not_end_the_attempt(tmp_path, monkeypatch):
    born: list[int] = []

    async def engine(control: Control) -> None:
        born.append(len(born))
        if len(born) == 1:
            raise PeerLost("rollout-0 is gone: killed")
        control.end("done")

    attempts = Attempts(tmp_path, monkeypatch, trainer(until_the_end, workers={"rollout-0": engine}))
    assert attempts.summary.status == "done" and attempts.summary.faults == 1
    assert attempts.clusters[0].lost == ["rollout-0"]
    assert read_faults(attempts.run.faults)[0].replacement == "rollout-0.2"


def test_an_engine_that_dies_too_often_ends_the_run_in_order(tmp_path, monkeypatch):
    saved: list[str] = []

    async def trains(control: Control) -> None:
        await control.over.wait()
        saved.append("checkpoint")

    cluster = trainer(trains, workers={"rollout-0": fails(PeerLost("rollout-0 is gone: killed"))})
    attempts = Attempts(tmp_path, monkeypatch, cluster, run={"restarts": 1})
    assert attempts.summary.status == "failed" and "run.restarts" in attempts.summary.reason
    assert saved == ["checkpoint"] and len(attempts.inputs) == 1


def test_a_trainer_that_dies_while_it_writes_the_last_checkpoint_is_replaced(tmp_path, monkeypatch):
    attempts = Attempts(tmp_path, monkeypatch, trainer(fails_late(LOST)), trainer(ends_well))
    assert attempts.summary.status == "done" and len(attempts.inputs) == 2
