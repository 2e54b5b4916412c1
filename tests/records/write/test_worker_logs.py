"""Tests the logs of a run: output of a process and its children, the console's lines, and the bound of a file."""

# ruff: noqa: T201 (prints are the subject)

from __future__ import annotations

import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from omni_async.aio.clock import WallClock
from omni_async.aio.threads import DaemonThread
from omni_async.cli import main
from omni_async.records.write import logs
from omni_async.records.write.console import LineConsole
from omni_async.records.write.logs import Consoles, LogConsole, SharedOutput, keep_bounded, printing_as
from tests.support.job_world import run, write_recipe
from tests.support.places import ROOT

_LOUD = """
import logging, os, sys
from pathlib import Path
from omni_async.records.write.logs import capture_output
capture_output(Path(sys.argv[1]))
print("a print")
os.system("echo a child")
logging.getLogger("any").warning("a warning")
os.abort()
"""


def test_everything_that_a_process_prints_is_in_its_log(tmp_path):
    """A process that dies at once leaves its last lines, too."""
    log = tmp_path / "logs" / "reward-0.log"
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", _LOUD, str(log)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert done.stdout == done.stderr == ""
    assert log.read_text() == "a print\na child\na warning\n" * 2
    assert log.parent.stat().st_mode & 0o777 == 0o700


def test_a_process_whose_log_cannot_be_written_prints_as_before(tmp_path):
    (tmp_path / "logs").touch()
    done = subprocess.run(
        [sys.executable, "-c", _LOUD, str(tmp_path / "logs" / "reward-0.log")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "a child" in done.stdout and "a warning" in done.stderr


def test_a_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What another process appends after the file was emptied is at its new beginning."""
    monkeypatch.setattr(logs, "LARGEST", 10)
    log = tmp_path / "reward-0.log"
    log.write_bytes(b"123456789")
    keep_bounded(log)
    assert [path.name for path in tmp_path.iterdir()] == ["reward-0.log"]
    with log.open("ab", buffering=0) as other:
        other.write(b"abcdefg")
        keep_bounded(log)
        other.write(b"later\n")
    assert log.read_bytes() == b"later\n"
    assert (tmp_path / "reward-0.log.1").read_bytes() == b"789abcdefg"


def test_output_of_workers_in_one_process_is_told_apart(tmp_path: Path, capsys):
    """A handler that was made before holds the stream itself."""
    output, handler, thread = SharedOutput(tmp_path / "logs"), logging.StreamHandler(sys.stderr), DaemonThread("engine")
    logger = logging.getLogger("told apart")
    logger.addHandler(handler)
    output.open()
    print("of the driver")
    with printing_as("reward-0"):
        print("a", "print")
        sys.stdout.write(" 10%\r")
        thread.submit(print, "in its thread", file=sys.stderr).result()
    with printing_as("rollout-0"):
        logger.warning("a warning")
        print("never ends", end="")
    print("of the driver, too")
    output.close()
    with printing_as("reward-0"):
        print("after the end")
    output.close()
    logger.removeHandler(handler)
    shown = capsys.readouterr()
    assert shown.out.split("\n")[:2] == ["of the driver", "a print"] and shown.out.endswith("after the end\n")
    assert shown.err == "in its thread\na warning\n"
    written = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert {name: sorted(text.splitlines()) for name, text in written.items()} == {
        "reward-0.log": [" 10%", "a print", "in its thread"],
        "rollout-0.log": ["a warning", "never ends"],
    }
    assert (tmp_path / "logs").stat().st_mode & 0o777 == 0o700


def test_shared_output_is_bounded_and_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(logs, "LARGEST", 100)
    monkeypatch.setattr(logs, "_LONGEST_LINE", 50)
    output = SharedOutput(tmp_path)
    output.open()
    with printing_as("reward-0"), ThreadPoolExecutor(1) as pool:
        for number in range(30):
            print(f"line {number}")
        assert (tmp_path / "reward-0.log").stat().st_size < 100
        assert (tmp_path / "reward-0.log.1").stat().st_size < 200
        print("\r".join(["a bar"] * 10), end="")
        assert any(b"a bar\ra bar" in log.read_bytes() for log in tmp_path.iterdir()), "not held until its end"
        pool.submit(print, "of no worker").result()
    (tmp_path / "rollout-0.log").mkdir()
    with printing_as("rollout-0"):
        print("a log that cannot be written")
    output.close()
    shown = capsys.readouterr().out
    assert shown.count("line ") == 30 and "of no worker" in shown and "a log that cannot be written" in shown
    assert "of no worker" not in (tmp_path / "reward-0.log").read_text()


_REWARD = """
import logging
def loud(images, prompts):
    for prompt in prompts:
        print("judging", prompt.text)
    logging.getLogger("loud").warning("a warning of the scorer")
    return [number / 10 for number, _ in enumerate(images)]
"""


def test_workers_of_a_run_in_one_process_have_logs(tmp_path: Path, checkpoint: str, capsys):
    """The diffusers engine, the trainer and the scorers are in the process of the command."""
    recipe = write_recipe(tmp_path, checkpoint)
    (tmp_path / "loud.py").write_text(_REWARD)
    made = run(recipe, "trainer.updates=1", f"reward.scorers=[{{name: {tmp_path / 'loud.py'}:loud}}]")
    shown = capsys.readouterr()
    assert "judging the digit 7" in shown.out
    lines = (made.path / "logs" / "reward-0.log").read_text().splitlines()
    scored = [line for line in lines if line.startswith("judging ")]
    assert len(scored) == shown.out.count("judging ") >= 8
    assert "update 1/1" in shown.out and not any("update 1/1" in line for line in lines)
    assert "update 1/1" in (made.path / "logs" / "driver.log").read_text()
    assert main(["logs", str(made.path), "reward", "--lines", "1000"]) == 0
    assert capsys.readouterr().out.count("reward-0 | judging ") == len(scored)


def test_the_console_is_logged_with_its_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    log = tmp_path / "logs" / "driver.log"
    console = Consoles(LineConsole(sys.stdout, 3), LogConsole(log, 3, WallClock()))
    console.phase("starting Ray")
    console.update({"update": 1, "reward": 0.5})
    console.note("a note\x1b[31m of a key=1 api_key=secret")
    console.close(["done: 1 update"])
    console.note("too late")
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == ["starting Ray", "update 1/3 reward 0.500"] and len(shown) == 4
    assert [line[20:] for line in log.read_text().splitlines()] == shown
    assert log.read_text()[:2] in ("19", "20") and "secret" not in log.read_text()
    log.unlink()
    log.mkdir()
    LogConsole(log, 3, WallClock()).note("a file that cannot be written stops nothing")
