"""Tests `omni-async logs` and `omni-async runs`: what they print of run folders in any state."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from omni_async.cli import main
from omni_async.records.read.logs import read_log
from omni_async.records.write.rundir import RunDirectory
from tests.support.patience import wait_for


def made(folder: Path, **logs: str) -> RunDirectory:
    run = RunDirectory(folder)
    run.logs.mkdir(parents=True)
    run.config_yaml.write_text("{}")
    for name, content in logs.items():
        (run.logs / f"{name.replace('_', '-')}.log").write_bytes(content.encode())
    return run


def test_logs_of_all_workers_and_of_some(tmp_path, capsys):
    run = made(tmp_path, driver="one\ntwo\nthree\n", reward_0="a\x1b[31m\r\n 10%\r 99%\nunfinished", rollout_0="x\n")
    (run.logs / "driver.log.1").write_text("older\n")
    assert main(["logs", str(tmp_path), "--lines", "2"]) == 0
    shown = ["driver | two", "driver | three", "reward-0 | a\\x1b[31m", "reward-0 |  99%", "rollout-0 | x"]
    assert capsys.readouterr().out.splitlines() == shown
    assert main(["logs", str(tmp_path), "reward"]) == 0
    assert capsys.readouterr().out.splitlines() == shown[2:4]
    assert main(["logs", str(tmp_path), "rollout-0"]) == 0
    assert capsys.readouterr().out == "x\n"


def test_a_log_that_is_missing(tmp_path, capsys):
    made(tmp_path / "run", driver="one\n", reward_0="")
    made(tmp_path / "old")
    for given, said in (
        (["run", "trainer"], "has no log of 'trainer'; it has driver, reward-0"),
        (["old"], "has no logs"),
        (["none"], "is not a run folder"),
    ):
        assert main(["logs", str(tmp_path / given[0]), *given[1:]]) == 2
        assert said in capsys.readouterr().err
    (tmp_path / "run" / "logs" / "link.log").symlink_to("/etc/hostname")
    assert main(["logs", str(tmp_path / "run"), "link"]) == 2
    assert "it leads out of its folder" in capsys.readouterr().err


def test_following_ends_with_the_run(tmp_path, capfd):
    """The log is emptied meanwhile, and another worker begins one."""
    run = made(tmp_path, driver="one\ntwo\n")
    run._claim()
    seen: list[str] = []

    def has(text: str) -> bool:
        seen.append(capfd.readouterr().out)
        return text in "".join(seen)

    following = threading.Thread(target=main, args=(["logs", str(tmp_path), "-f"],))
    following.start()
    wait_for(lambda: has("driver | two"), "the lines that were there")
    (run.logs / "driver.log").write_text("six\n")
    (run.logs / "reward-0.log").write_text("new\n")
    wait_for(lambda: has("driver | six") and has("reward-0 | new"), "later lines")
    run.release()
    following.join(60)
    assert not following.is_alive()
    assert "".join(seen).splitlines() == ["driver | one", "driver | two", "driver | six", "reward-0 | new"]


def test_the_bytes_of_a_read_are_bounded(tmp_path, monkeypatch):
    log = tmp_path / "a.log"
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    monkeypatch.setattr("omni_async.records.read.logs._LARGEST", 20)
    assert read_log(log, tmp_path) == (["line 98", "line 99"], log.stat().st_size)
    assert read_log(log, tmp_path, 0).lines == ["line 98", "line 99"]
    assert read_log(log, tmp_path, log.stat().st_size).lines == []


def test_runs_of_a_folder(tmp_path, capsys):
    first, second = made(tmp_path / "a-20260101-120000"), made(tmp_path / "b-20260102-120000")
    (tmp_path / "other").mkdir()
    lines = [
        {"update": 0, "validation/reward": 0.25},
        {"update": 1, "finished": 5.0, "reward": 0.5},
        {"update": 2, "finished": 6.0, "reward": 0.75},
    ]
    first.metrics.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"upd')
    second._claim()
    assert main(["runs", str(tmp_path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["run", "status", "update", "reward", "validation", "began"]
    assert rows[1][:4] == ["b-20260102-120000", "running", "0", rows[1][3]] and rows[1][-1] == "ago"
    assert rows[2][:5] == ["a-20260101-120000", "killed", "2", "0.750", "0.250"]
    second.release()
    assert main(["runs", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["reward"] for one in found] == [None, 0.75] and found[1]["path"] == str(first.path)


@pytest.mark.parametrize(
    ("given", "said"),
    [("empty", "there is no run in"), ("none", "there is no run in"), ("file", "cannot be read: Not a directory")],
)
def test_a_folder_without_runs(tmp_path, capsys, given, said):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert main(["runs", str(tmp_path / given)]) == 2
    assert said in capsys.readouterr().err
