from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import yaml

from omni_async.aio.clock import ManualClock
from omni_async.config import schema
from omni_async.tracking.attempts import Attempt
from omni_async.tracking.rundir import RunDirectory, RunDirectoryError, append_jsonl
from omni_async.types import LedgerEntry
from tests.e2e.runs import ENVIRONMENT


def config(folder: Path | str) -> schema.Config:
    return schema.Config(
        run=schema.Run(name="quick", dir=str(folder)),
        model=schema.Model(path="model"),
        data=schema.Data(prompts="prompts.txt"),
        reward=schema.Reward(scorers=(schema.Scorer(name="ocr"),)),
    )


def test_a_run_folder_has_its_folders_and_the_resolved_configuration(tmp_path: Path) -> None:
    run = RunDirectory.create(config(tmp_path / "new" / "runs"), ManualClock(1_800_000_000))
    assert run.path.parent == tmp_path / "new" / "runs"
    assert run.run_id.startswith("quick-2027") and len(run.run_id) == len("quick-20270115-080000")
    assert run.samples.is_dir() and run.checkpoints.is_dir()
    resolved = yaml.safe_load(run.config_yaml.read_text())
    assert resolved["rollout"]["group_size"] == 8
    assert msgspec.convert(resolved, schema.Config).trainer == schema.Trainer()


def test_runs_of_the_same_second_get_numbers(tmp_path: Path) -> None:
    runs = [RunDirectory.create(config(tmp_path), ManualClock(0)) for _ in range(3)]
    assert [r.run_id.removeprefix(runs[0].run_id) for r in runs] == ["", "-2", "-3"]


def test_lines_are_appended(tmp_path: Path) -> None:
    run = RunDirectory.create(config(tmp_path), ManualClock(0))
    entry = LedgerEntry("r", 1, 2, "trained", None, 3, 4, 1, (3, 3), 1, 0.5)
    append_jsonl(run.ledger, entry)
    run.append_metrics(1, {"loss": 0.25, "nan": float("nan")})
    run.append_metrics(2, {"loss": 0.5})
    assert msgspec.json.decode(run.ledger.read_bytes(), type=LedgerEntry) == entry
    assert [json.loads(line) for line in run.metrics.read_text().splitlines()] == [
        {"update": 1, "loss": 0.25, "nan": None},
        {"update": 2, "loss": 0.5},
    ]


def test_a_line_that_does_not_fit_leaves_nothing_of_itself(tmp_path: Path) -> None:
    """Checks that no part is left, or the next line that fits would be lost with it."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (30, 30))"
    append = (
        "from pathlib import Path; from omni_async.tracking.rundir import append_jsonl; append_jsonl(Path('x.jsonl'),"
        " {'a': 'b' * 9})"
    )
    append_jsonl(tmp_path / "x.jsonl", {"update": 1, "b": 2})
    done = subprocess.run(
        [sys.executable, "-c", f"{limit}; {append}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=60,
    )
    assert "cannot append to x.jsonl: File too large" in done.stderr
    append_jsonl(tmp_path / "x.jsonl", {"update": 2})
    assert (tmp_path / "x.jsonl").read_bytes() == b'{"update":1,"b":2}\n{"update":2}\n'


def test_seconds_of_earlier_attempts_are_those_that_led_to_the_version(tmp_path: Path) -> None:
    run = RunDirectory.create(config(tmp_path), ManualClock(0))
    assert run.wall_s(0) == 0.0
    for update in (1, 2):
        run.append_metrics(update, {"reward": None, "wall_s": 10.0 * update, "finished": 1.0})
    append_jsonl(run.attempts, Attempt(0.0, 1.0, "interrupted", None, 0, 2, 23.0))
    with run.attempts.open("ab") as torn:
        torn.write(b'{"cut o')
    assert (run.wall_s(1), run.wall_s(2), run.wall_s(3)) == (10.0, 23.0, 0.0)


def test_an_attempt_whose_last_update_was_made_again_does_not_count_in_the_seconds(tmp_path: Path) -> None:
    """Covers the case that the attempt that made it again was killed, and left no line."""
    run = RunDirectory.create(config(tmp_path), ManualClock(0))
    append_jsonl(run.attempts, Attempt(0.0, 100.0, "failed", None, 0, 2, 90.0))
    run.append_metrics(2, {"reward": None, "wall_s": 40.0, "finished": 200.0})
    assert run.wall_s(2) == 40.0


def test_a_run_is_running_until_it_is_released(tmp_path: Path) -> None:
    run = RunDirectory.create(config(tmp_path), ManualClock(0))
    assert RunDirectory(run.path).is_running()
    run.release()
    assert not RunDirectory(run.path).is_running()


def test_an_impossible_folder_is_one_clear_error(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(RunDirectoryError, match=r"run\.dir: cannot make a run folder in .*/file: .* \(.*/file\)$"):
        RunDirectory.create(config(blocker), ManualClock(0))
    with pytest.raises(RunDirectoryError, match="/proc/runs"):
        RunDirectory.create(config("/proc/runs"), ManualClock(0))
    with pytest.raises(RunDirectoryError, match=r"cannot append to .*gone"):
        append_jsonl(tmp_path / "gone" / "x.jsonl", {})
