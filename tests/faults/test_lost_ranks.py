"""Tests trainer ranks on real Ray actors, with a real model: one is killed in the middle of an update, in every layout,
and each layout goes on from what the one before has written."""

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
LAYOUTS = {
    "two ranks": ("trainer.workers=2",),
    "a sequence over two ranks": ("trainer.workers=2", "trainer.sequence_parallel=2"),
    "two copies of two ranks": ("trainer.workers=4", "trainer.shard=2", "trainer.offload=true"),
    "one rank": ("trainer.workers=1",),
}
_UPDATES = 9


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_that_is_killed_costs_an_attempt_and_every_layout_goes_on_from_another(
    checkpoint: str, tmp_path: Path
) -> None:
    recipe, before, updates = write_recipe(tmp_path, checkpoint), "null", 0
    for layout, keys in LAYOUTS.items():
        begun, updates = updates, updates + _UPDATES
        run = Disturbed.of(recipe, *SETTINGS, *keys, f"trainer.updates={updates}", f"checkpoint.resume={before}")

        def kill_a_rank(run: Disturbed, begun: int = begun) -> None:
            run.updated(begun + 3, 180)
            run.signal("trainer-1", signal.SIGKILL)

        kills = layout != "one rank"
        summary = run.run(kill_a_rank if kills else lambda _: None, 200)
        assert (summary.status, summary.updates) == ("done", updates), (layout, summary.reason)
        assert problems(run.job) == [], layout
        if kills:
            fault = run.faults[-1]
            assert "trainer" in fault.part and "again from update" in fault.replacement, layout
        before = str(run.job.run)
    assert len(run.faults) == len(LAYOUTS) - 1
