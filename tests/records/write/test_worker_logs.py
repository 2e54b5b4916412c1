"""Tests the logs of a run: output of a process and its children, the console's lines, and the bound of a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from omni_async.aio.clock import WallClock
from omni_async.records.write import logs
from omni_async.records.write.console import LineConsole
from omni_async.records.write.logs import Consoles, LogConsole, keep_bounded
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
