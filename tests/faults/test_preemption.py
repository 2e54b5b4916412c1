"""Tests SIGTERM, as a cluster sends it before it takes a machine away: a checkpoint within 30 seconds, whatever was
under way."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import checkpoint
from tests.e2e.emulation import write_recipe
from tests.e2e.runs import started
from tests.e2e.runs import write_recipe as write_small_recipe
from tests.faults.disturbed import profile

__all__ = ["checkpoint"]

DEADLINE_S = 30.0


def preempt(line: str, after_s: float, recipe: Path, *settings: str) -> None:
    """Sends SIGTERM to the process group, as `timeout`, SLURM and systemd do, `after_s` after a line that begins so;
    the process ends in time."""
    with started(line, recipe, *settings) as process:
        time.sleep(after_s)
        os.killpg(process.pid, signal.SIGTERM)
        signalled = time.monotonic()
        said = process.communicate(timeout=DEADLINE_S)[0]
        assert process.returncode == 130, said
        assert time.monotonic() - signalled < DEADLINE_S


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["ray", "inprocess"])
def test_a_run_that_is_preempted_leaves_a_checkpoint_in_time(tmp_path: Path, runtime: str) -> None:
    """Stops the run in the middle of an update of 8 groups that takes 80 s to compute."""
    recipe = write_recipe(tmp_path, profile("train", 10.0))
    settings = [f"run.runtime={runtime}", "trainer.streaming=off", "trainer.updates=50", "checkpoint.every=50"]
    # All groups are there by then, and the update is being made.
    preempt("groups are trained on when", 8, recipe, *settings)
    (run,) = (tmp_path / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["updates"], summary["conserved"]) == ("interrupted", 0, True)
    state = json.loads((run / "checkpoints" / "update-000000" / "state.json").read_text())
    assert state["control"]["version"] == 0 and len(state["control"]["ready"]) >= 8, (
        "what the trainer had taken is kept"
    )


@pytest.mark.slow
def test_a_run_that_is_preempted_while_it_loads_ends_in_order(checkpoint: str, tmp_path: Path) -> None:
    """Stops the run once Ray has started, which would take the signal for itself, and whose processes would die of
    it."""
    preempt("loading engines", 1, write_small_recipe(tmp_path, checkpoint), "run.runtime=ray")
    (run,) = (tmp_path / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("interrupted", "before the first update")
    assert not (run / "control.sock").exists()
