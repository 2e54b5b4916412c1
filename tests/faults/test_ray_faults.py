"""Tests kill -9 and SIGSTOP of every kind of process, in the middle of everything it does, on real Ray actors: the run
goes on and nothing is lost.

The profile decides what a process is in the middle of: it is nearly always in the stage that takes nearly all of the
time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from omni_async.performance.profile import Payload
from omni_async.records.write.summary import Summary
from omni_async.runtime.on_ray.connection import connect
from tests.support.job_world import Disturbed, slow_at
from tests.support.patience import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.sliced(floor=1)]
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
Blows = Iterable[tuple[str, int]]


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    connection = connect(None, 4)
    yield
    connection.close()


def strike(run: Disturbed, blows: Blows, after: int = 2) -> Summary:
    """Strikes one after the other, the first after some updates, each when the one before is mended and the run has
    moved on. The run must lose nothing."""

    def disturb(run: Disturbed) -> None:
        run.updated(after)
        for mended, (slot, number) in enumerate(blows, start=1):
            parts = run.parts()
            part = max((name for name in parts if name.partition(".")[0] == slot), default=slot)
            os.kill(pid := parts[part]["pid"], number)
            run.wait_for(lambda mended=mended: len(run.faults) == mended, 2 * PATIENCE)  # type: ignore[misc]
            assert run.faults[-1].part == part
            assert not Path(f"/proc/{pid}").exists(), "a stopped process would keep its memory and its accelerator"
            updates = len(run.console.updates)
            run.wait_for(lambda updates=updates: len(run.console.updates) > updates)  # type: ignore[misc]
        run.stop()

    summary = run.run(disturb)
    run.require_whole(summary)
    return summary


BROADCAST = slow_at("swap", 0.05, Payload(trajectory=20_000, media=3_000, weights=60_000_000))


@pytest.mark.parametrize(
    ("made", "transport", "slots", "last"),
    [
        (slow_at("generate", 0.05), "object_store", ("rollout-0", "rollout-1", "rollout-1"), KILL),
        (slow_at("score", 0.05), "object_store", ("reward-0", "reward-1", "rollout-0"), KILL),
        # Transfers weights that take longer than everything else together.
        (BROADCAST, "object_store", ("rollout-0", "rollout-1"), KILL),
        pytest.param(BROADCAST, "collective", ("rollout-0", "rollout-1"), STOP, marks=pytest.mark.thorough),
    ],
    ids=["engines at work", "reward workers at work", "in a publish", "in a broadcast"],
)
def test_workers_that_die_or_hang_are_replaced(tmp_path, made, transport, slots, last):
    run = Disturbed.emulated(tmp_path, made, weights={"transport": transport})
    blows = [*((slot, KILL) for slot in slots[:-1]), (slots[-1], last)]
    assert strike(run, blows).faults == len(blows)


def test_stored_samples_of_dead_workers_are_generated_again(tmp_path):
    run = Disturbed.emulated(
        tmp_path, slow_at("none", 0.0, Payload(trajectory=6_000_000, media=6_000_000, weights=100_000))
    )

    def generated_again() -> bool:
        return any(line["attempts"] > 1 for line in run.ledger())

    def blows() -> Iterator[tuple[str, int]]:
        yield from (("rollout-0", KILL), ("reward-0", KILL), ("rollout-1", KILL))
        for _ in range(10):  # an engine may have died with nothing stored that was still wanted
            if not generated_again():
                yield "rollout-0", KILL

    strike(run, blows())
    assert generated_again(), "samples were lost with their engine"


def test_all_engines_at_once(tmp_path):
    def disturb(run: Disturbed) -> None:
        run.updated(2)
        parts = run.parts()
        for name in ("rollout-0", "rollout-1"):
            os.kill(parts[name]["pid"], KILL)
        run.wait_for(lambda: len(run.faults) == 2)
        run.stop()

    run = Disturbed.emulated(tmp_path, slow_at("generate", 0.1))
    run.require_whole(run.run(disturb))


def test_a_lost_trainer_or_coordinator(tmp_path):
    """Kills the trainer (rank 0 and the publisher run in its process) and the coordinator."""
    run = Disturbed.emulated(tmp_path, slow_at("train", 0.05))
    strike(run, [("trainer", KILL), ("coordinator", KILL), ("trainer", STOP)], after=8)
    assert all("again from update" in fault.replacement for fault in run.faults)
    assert (run.job.run / "ledger.jsonl.void").exists()


def test_a_trainer_that_dies_while_it_writes_a_checkpoint(tmp_path):
    """Keeps large groups in the replay buffer, whose trajectories are written too."""

    def disturb(run: Disturbed) -> None:
        run.updated(5)
        pid = run.parts()["trainer"]["pid"]
        run.wait_for(lambda: any((run.job.run / "checkpoints").glob(".*.partial")))
        os.kill(pid, KILL)
        run.wait_for(lambda: bool(run.faults))
        run.stop()

    made = slow_at("none", 0.0, Payload(trajectory=2_000_000, media=1_000, weights=1_000))
    run = Disturbed.emulated(tmp_path, made, checkpoint={"every": 1})
    run.require_whole(run.run(disturb))


def test_workers_are_added_and_removed_while_the_job_runs(tmp_path):
    def disturb(run: Disturbed) -> None:
        run.updated(2)
        assert "rollout-2" in run.scale(rollout=3, reward=1)["parts"]
        run.wait_for(lambda: "reward-1" not in run.parts())
        run.updated(run.last_update + 3)
        run.scale(rollout=1)
        run.wait_for(lambda: [name for name in run.parts() if name.startswith("rollout")] == ["rollout-0"])
        run.stop()

    run = Disturbed.emulated(tmp_path, slow_at("generate", 0.05))
    summary = run.run(disturb)
    run.require_whole(summary)
    assert summary.faults == 0
