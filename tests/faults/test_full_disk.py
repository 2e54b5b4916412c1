"""No space left on the device: the run ends soon, says so in one line, and keeps the checkpoint it has."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from omni_async.checkpoint.folders import newest_first, require_whole
from omni_async.config import load
from omni_async.config.schema import Config
from omni_async.control.clock import Clock
from omni_async.runtime.preflight import preflight
from omni_async.runtime.train import train
from omni_async.tracking.rundir import RunDirectory
from tests.e2e.emulation import write_recipe
from tests.runtime.runtime_world import RememberingConsole

QUICK = ["emulation.time_scale=0.001", "trainer.updates=400", "checkpoint.every=2", "run.restarts=2"]


def fill(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """These files of the run folder are on a device that is full."""
    create = RunDirectory.create.__func__  # type: ignore[attr-defined]

    def on_a_full_disk(cls: type[RunDirectory], config: Config, clock: Clock) -> RunDirectory:
        run: RunDirectory = create(cls, config, clock)
        for name in names:
            (run.path / name).symlink_to("/dev/full")
        return run

    monkeypatch.setattr(RunDirectory, "create", classmethod(on_a_full_disk))


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl"])
def test_a_line_that_cannot_be_written_ends_the_run_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fill(monkeypatch, name)
    summary = train(preflight(load(write_recipe(tmp_path), QUICK)), RememberingConsole())
    assert summary.status == "failed" and summary.reason is not None
    assert "No space left on device" in summary.reason and "\n" not in summary.reason


def test_checkpoints_that_cannot_be_written_are_told_of_and_the_last_one_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Space may come back while the run goes on, so only the last one ends it."""
    from omni_async.actors import checkpointer

    written = 0

    def sometimes(folder: Path, state: Any) -> None:
        nonlocal written
        written += 1
        if written > 3:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))
        real(folder, state)

    real = checkpointer.write_state
    monkeypatch.setattr(checkpointer, "write_state", sometimes)
    console = RememberingConsole()
    summary = train(preflight(load(write_recipe(tmp_path), [*QUICK, "trainer.updates=12"])), console)
    assert summary.status == "failed" and "No space left on device" in (summary.reason or "")
    assert summary.updates == 12
    assert any("update-000008 could not be written" in phase and "No space" in phase for phase in console.phases)
    (run,) = (tmp_path / "runs").iterdir()
    newest = next(newest_first(run / "checkpoints"))
    require_whole(newest)
    assert newest.name == "update-000006"
