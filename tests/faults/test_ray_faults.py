"""kill -9 and SIGSTOP of every kind of process, in the middle of everything it does, on real Ray actors: the run goes on and nothing is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from omni_async.performance.profile import Payload
from omni_async.runtime.ray_connection import connect
from tests.faults.disturbed import Disturbed, profile

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
# Large enough that a process spends most of its time with the object store.
LARGE = Payload(trajectory=8_000_000, media=8_000_000, weights=100_000)


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    assert connect(None, 4)
    yield
    ray.shutdown()


@pytest.mark.parametrize(
    ("part", "number", "slow"),
    [
        ("rollout-0", KILL, "generate"),
        ("rollout-1", STOP, "generate"),
        ("reward-0", KILL, "score"),
        ("reward-1", STOP, "score"),
        ("rollout-0", KILL, "publish"),  # in the middle of a broadcast
        ("rollout-0", STOP, "swap"),
    ],
)
def test_a_worker_that_dies_or_hangs_is_replaced_and_nothing_is_lost(tmp_path: Path, part: str, number: int, slow: str) -> None:
    def disturb(run: Disturbed) -> None:
        run.updated(2)
        pid = run.parts()[part]["pid"]
        run.signal(part, number)
        run.wait_for(lambda: any(fault.part == part for fault in run.faults))
        assert not Path(f"/proc/{pid}").exists(), "a stopped process would keep its memory and its accelerator"
        assert f"{part}.2" in run.parts()
        run.stop()

    run = Disturbed(tmp_path, profile(slow, 0.05))
    summary = run.run(disturb)
    run.require_whole(summary)
    assert summary.faults == 1


@pytest.mark.parametrize(("part", "number"), [("rollout-0", KILL), ("reward-0", KILL)])
def test_a_worker_that_dies_while_it_puts_or_gets_is_replaced(tmp_path: Path, part: str, number: int) -> None:
    """What it had stored is gone with it, and generated again."""

    def disturb(run: Disturbed) -> None:
        run.updated(2)
        run.signal(part, number)
        run.wait_for(lambda: bool(run.faults))
        run.stop()

    run = Disturbed(tmp_path, profile("none", 0.0, LARGE))
    run.require_whole(run.run(disturb))
    if part.startswith("rollout"):
        assert any(line["attempts"] > 1 for line in run.ledger()), "samples were lost with it"


@pytest.mark.parametrize(
    ("part", "number", "slow"),
    [
        ("trainer", KILL, "train"),
        ("trainer", STOP, "export"),  # the publisher and rank 0 live there too
        ("coordinator", KILL, "generate"),
        ("coordinator", STOP, "score"),
    ],
)
def test_a_run_that_loses_its_heart_goes_on_from_its_last_checkpoint(tmp_path: Path, part: str, number: int, slow: str) -> None:
    def disturb(run: Disturbed) -> None:
        run.updated(8)
        run.signal(part, number)
        run.wait_for(lambda: bool(run.faults))
        run.stop()

    run = Disturbed(tmp_path, profile(slow, 0.05))
    summary = run.run(disturb)
    run.require_whole(summary)
    (fault,) = run.faults
    assert fault.part == part and "again from update" in fault.replacement


def test_a_trainer_that_dies_while_it_writes_a_checkpoint_goes_on_from_the_one_before(tmp_path: Path) -> None:
    """With large groups in the replay buffer, whose trajectories are written too."""

    def disturb(run: Disturbed) -> None:
        run.updated(5)
        run.wait_for(lambda: any((run.job.run / "checkpoints").glob(".*.partial")))
        run.signal("trainer", KILL)
        run.wait_for(lambda: bool(run.faults))
        run.stop()

    run = Disturbed(tmp_path, profile("none", 0.0, Payload(trajectory=2_000_000, media=1_000, weights=1_000)), checkpoint={"every": 1})
    run.require_whole(run.run(disturb))


def test_every_engine_at_once(tmp_path: Path) -> None:
    def disturb(run: Disturbed) -> None:
        run.updated(2)
        parts = run.parts()
        for name in ("rollout-0", "rollout-1"):
            os.kill(parts[name]["pid"], KILL)
        run.wait_for(lambda: len(run.faults) == 2)
        run.stop()

    run = Disturbed(tmp_path, profile("generate", 0.1))
    run.require_whole(run.run(disturb))


def test_a_part_that_cannot_be_brought_back_ends_the_run_soon_with_a_checkpoint_and_the_reason(tmp_path: Path) -> None:
    killed = 0.0

    def disturb(run: Disturbed) -> None:
        nonlocal killed
        run.updated(4)
        run.signal("rollout-0", KILL)
        killed = time.monotonic()

    run = Disturbed(tmp_path, profile("generate", 0.05), run={"restarts": 0})
    summary = run.run(disturb)
    assert time.monotonic() - killed < 20
    assert summary.status == "failed" and "rollout-0 was lost" in (summary.reason or "") and "run.restarts is 0" in (summary.reason or "")
    newest = sorted((run.job.run / "checkpoints").glob("update-*"))[-1].name
    assert int(newest.removeprefix("update-")) == summary.updates


def test_workers_are_added_and_removed_while_the_job_runs(tmp_path: Path) -> None:
    def disturb(run: Disturbed) -> None:
        run.updated(2)
        parts = run.scale(rollout=3, reward=1)["parts"]
        assert "rollout-2" in parts
        run.wait_for(lambda: "reward-1" not in run.parts())
        before = run.console.updates[-1]["update"]
        run.updated(before + 3)
        run.scale(rollout=1)
        run.wait_for(lambda: [name for name in run.parts() if name.startswith("rollout")] == ["rollout-0"])
        run.stop()

    run = Disturbed(tmp_path, profile("generate", 0.05))
    summary = run.run(disturb)
    run.require_whole(summary)
    assert summary.faults == 0
