"""Tests trainer ranks on real Ray actors, with a real model: one is killed in the middle of an update, and later
another number of ranks goes on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from benchmarks.kill_everything import problems
from tests.e2e.conftest import checkpoint
from tests.e2e.runs import write_recipe
from tests.faults.disturbed import Disturbed

__all__ = ["checkpoint"]

SETTINGS = (
    "run.runtime=ray",
    "run.health_timeout_s=5",
    "staleness.max_updates=2",
    "checkpoint.every=2",
    "trainer.optimizer.lr=0.1",
)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_rank_that_is_killed_costs_an_attempt_and_another_number_of_ranks_goes_on(
    checkpoint: str, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path, checkpoint)

    def kill_a_rank(run: Disturbed) -> None:
        run.updated(3, 180)
        run.signal("trainer-1", signal.SIGKILL)

    run = Disturbed.of(recipe, *SETTINGS, "trainer.workers=2", "trainer.updates=40")
    summary = run.run(kill_a_rank, 200)
    assert (summary.status, summary.faults) == ("done", 1), summary.reason
    assert problems(run.job) == []
    (fault,) = run.faults
    assert "trainer" in fault.part and "again from update" in fault.replacement

    further = Disturbed.of(
        recipe, *SETTINGS, "trainer.workers=1", "trainer.updates=43", f"checkpoint.resume={run.job.run}"
    )
    summary = further.run(lambda _: None, 120)
    assert (summary.status, summary.updates) == ("done", 43), summary.reason
    assert problems(further.job) == []
