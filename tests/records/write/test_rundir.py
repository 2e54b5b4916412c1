"""Tests the folder of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import yaml

from omni_async.aio.clock import ManualClock
from omni_async.config import schema, trainer
from omni_async.records.write.attempts import Attempt
from omni_async.records.write.rundir import RunDirectory, RunDirectoryError, append_jsonl
from tests.support.configs import build
from tests.support.job_world import ENVIRONMENT
from tests.support.patience import PATIENCE


def config(folder: Path | str) -> schema.Config:
    return build({"run": {"name": "quick", "dir": str(folder)}})


def test_a_run_folder_has_its_folders_and_the_resolved_configuration_and_those_of_a_second_get_numbers(tmp_path):
    runs = [RunDirectory.create(config(tmp_path / "new" / "runs"), ManualClock(1_800_000_000)) for _ in range(3)]
    assert [r.run_id.removeprefix(runs[0].run_id) for r in runs] == ["", "-2", "-3"]
    run = runs[0]
    assert run.path.parent == tmp_path / "new" / "runs"
    assert run.run_id.startswith("quick-2027") and len(run.run_id) == len("quick-20270115-080000")
    assert run.samples.is_dir() and run.checkpoints.is_dir()
    resolved = yaml.safe_load(run.config_yaml.read_text())
    assert resolved["rollout"]["group_size"] == 8
    assert msgspec.convert(resolved, schema.Config).trainer == trainer.Trainer()
    assert RunDirectory(run.path).is_running()
    run.release()
    assert not RunDirectory(run.path).is_running()


def test_a_line_that_does_not_fit_leaves_nothing_of_itself(tmp_path: Path) -> None:
    """Checks that no part is left, or the next line that fits would be lost with it."""
    program = (
        "import resource; from pathlib import Path; from omni_async.records.write.rundir import append_jsonl\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (30, 30)); append_jsonl(Path('x.jsonl'), {'a': 'b' * 9})"
    )
    append_jsonl(tmp_path / "x.jsonl", {"update": 1, "b": 2})
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT, timeout=PATIENCE)
    assert "cannot append to x.jsonl: File too large" in done.stderr
    append_jsonl(tmp_path / "x.jsonl", {"nan": float("nan")})
    assert (tmp_path / "x.jsonl").read_bytes() == b'{"update":1,"b":2}\n{"nan":null}\n'


def test_seconds_of_earlier_attempts_are_those_that_led_to_the_version(tmp_path: Path) -> None:
    run = RunDirectory.create(config(tmp_path), ManualClock(0))
    assert run.wall_s(0) == 0.0
    for update in (1, 2):
        run.append_metrics(update, {"reward": None, "wall_s": 10.0 * update, "finished": 1.0})
    append_jsonl(run.attempts, Attempt(0.0, 1.0, "interrupted", None, 0, 2, 23.0))
    with run.attempts.open("ab") as torn:
        torn.write(b'{"cut o')
    assert (run.wall_s(1), run.wall_s(2), run.wall_s(3)) == (10.0, 23.0, 0.0)
    # One whose last update was made again, by an attempt that was killed and left no line, does not count.
    run = RunDirectory.create(config(tmp_path), ManualClock(0))
    append_jsonl(run.attempts, Attempt(0.0, 100.0, "failed", None, 0, 2, 90.0))
    run.append_metrics(2, {"reward": None, "wall_s": 40.0, "finished": 200.0})
    assert run.wall_s(2) == 40.0


def test_an_impossible_folder_is_one_clear_error(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(RunDirectoryError, match=r"run\.dir: cannot make a run folder in .*/file: .* \(.*/file\)$"):
        RunDirectory.create(config(blocker), ManualClock(0))
    with pytest.raises(RunDirectoryError, match="/proc/runs"):
        RunDirectory.create(config("/proc/runs"), ManualClock(0))
    with pytest.raises(RunDirectoryError, match=r"cannot append to .*gone"):
        append_jsonl(tmp_path / "gone" / "x.jsonl", {})
