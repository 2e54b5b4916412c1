"""Tests the folder of a run, and the log of its spans: all on disk, the recent ones in memory."""

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
from omni_async.records.write.rundir import RunDirectory, RunDirectoryError, SpanLog, append_jsonl
from omni_async.types import Span
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
    with pytest.raises(RunDirectoryError, match=r"cannot append to .*gone/spans\.jsonl: No such file or directory"):
        SpanLog(tmp_path / "gone" / "spans.jsonl", keep_s=10.0).add(spans(0, 1))


# ---- spans -----------------------------------------------------------------------------------------------------------


def spans(start: int, count: int) -> list[Span]:
    return [Span("rollout-0", "generate", float(i), i + 0.5, {"group": i}) for i in range(start, start + count)]


def test_all_spans_are_kept_on_disk_and_the_recent_ones_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    SpanLog(path, keep_s=10.0).add(spans(0, 3))  # another process's, which begins anew
    log = SpanLog(path, keep_s=10.0)
    assert log.all() == []
    for start in range(0, 1000, 10):
        log.add(spans(start, 10))
    assert log.all() == spans(0, 1000)
    assert log.recent(995.0) == [Span(span.actor, span.kind, span.start, span.end) for span in spans(995, 5)]
    assert len(log._recent) <= 20
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:-9] + b"\n" + lines[2])
    assert log.all() == [*spans(0, 1), *spans(2, 1)], "a line that was cut off costs no other"
    log.remove_file()
    assert log.all() == [] and not path.exists()


def test_held_spans_stay_in_memory_until_the_file_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    SpanLog(path, keep_s=10.0).add(spans(0, 3))
    before = path.read_bytes()
    log = SpanLog(path, keep_s=10.0, held=True)
    log.add(spans(5, 2))
    log.remove_file()
    assert path.read_bytes() == before
    assert log.all() == spans(5, 2) and len(log.recent(0.0)) == 2
    log.begin_file()
    log.add(spans(7, 1))
    assert log.all() == spans(5, 3) and path.read_bytes().count(b"\n") == 3
