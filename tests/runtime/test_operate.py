"""`omni-async status`, `scale` and `stop`: what they print, and what they refuse in one line."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from omni_async.cli import main
from omni_async.runtime.control_socket import ControlSocket, Request

STATUS: dict[str, Any] = {
    "parts": {"coordinator": {"pid": 11, "node": "a"}, "rollout-0.2": {"pid": 12, "node": "a"}, "rollout-1": {"pid": 13, "node": "a"}},
    "faults": 3,
    "buffers": {"slots": {"live": 2, "capacity": 6}, "replay": {"capacity": 16, "reserved": 4, "ready": 1}},
    "conservation": {"admitted": 9, "trained": 6, "rejected": 1, "dropped": 0, "live": 2},
    "engines": {"rollout-0.2": 7, "rollout-1": -1},
}


@contextmanager
def running(run: Path) -> Iterator[list[Request]]:
    """A run that answers, and what it was asked."""
    run.mkdir()
    (run / "config.yaml").write_text("")
    asked: list[Request] = []
    ready, over = threading.Event(), threading.Event()

    async def answer(request: Request) -> dict[str, Any]:
        asked.append(request)
        return STATUS

    async def serve() -> None:
        async with ControlSocket(run / "control.sock") as control:
            control.answer, control.stop = answer, lambda: asked.append(Request(stop=True))
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    ready.wait(10)
    try:
        yield asked
    finally:
        over.set()
        thread.join(10)


def test_the_status_is_a_table_for_people_and_json_for_programs(tmp_path, capsys):
    with running(tmp_path / "run"):
        assert main(["status", str(tmp_path / "run")]) == 0
        said = capsys.readouterr().out
        assert main(["status", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == STATUS
    lines = said.splitlines()
    assert lines[2].split() == ["rollout-0.2", "12", "version", "7"] and lines[3].split() == ["rollout-1", "13", "none", "yet"]
    assert "groups: 9 admitted, 6 trained, 1 rejected, 0 dropped, 2 live" in lines
    assert "replay: 4 of 16 places taken, 1 ready" in lines and lines[-1] == "faults mended: 3"


def test_workers_are_asked_for_and_the_new_state_is_shown(tmp_path, capsys):
    with running(tmp_path / "run") as asked:
        assert main(["scale", str(tmp_path / "run"), "rollout=3", "reward=1"]) == 0
    assert asked == [Request(scale={"rollout": 3, "reward": 1})]
    assert "rollout-1" in capsys.readouterr().out


def test_a_run_is_stopped(tmp_path, capsys):
    with running(tmp_path / "run") as asked:
        assert main(["stop", str(tmp_path / "run")]) == 0
    assert asked == [Request(stop=True)]
    assert "checkpoint" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["status", "nowhere"], "nowhere is not a run folder"),
        (["scale", "run", "rollout=0"], "'rollout=0': expected rollout=N or reward=N with N at least 1"),
        (["scale", "run", "trainer=2"], "'trainer=2': expected rollout=N or reward=N"),
        (["scale", "run", "rollout"], "'rollout': expected"),
        (["status", "run"], "run is not running here: control.sock: No such file or directory"),
        (["stop", "run"], "run is not running here"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("")
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
