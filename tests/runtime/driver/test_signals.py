"""Tests how a whole run ends when a terminal closes or a batch system warns: as after SIGTERM, with a checkpoint."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.job_world import COMMAND, ENVIRONMENT, left_behind, slow_at, started, write_emulated
from tests.support.patience import PATIENCE

WARNINGS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def ended_by_hangups() -> Iterator[None]:
    """Let jobs begin as in a terminal, also where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def endless(folder: Path) -> Path:
    return write_emulated(folder, slow_at("step", 0.2), trainer={"updates": 5000, "groups_per_update": 2})


def ended_in_order(recipe: Path) -> bool:
    run = left_behind(recipe)
    states = list(run.path.glob("checkpoints/update-*/state.json"))
    return run.summary.status == "interrupted" and run.summary.updates > 0 and bool(states)


@pytest.mark.sliced(floor=1)
@pytest.mark.parametrize("number", WARNINGS)
def test_warning(tmp_path: Path, number: signal.Signals):
    recipe = endless(tmp_path)
    with started("update 2/", recipe) as job:
        os.killpg(job.pid, number)
        rest = job.communicate(timeout=PATIENCE)[0]
    assert job.returncode == 130 and "ending in order" in rest
    assert ended_in_order(recipe)


def test_ignored_at_start(tmp_path: Path):
    """Under nohup a run trains to its end."""
    recipe = write_emulated(tmp_path, slow_at("step", 0.2), trainer={"updates": 6, "groups_per_update": 2})
    ignored = {number: signal.signal(number, signal.SIG_IGN) for number in WARNINGS}
    try:
        with started("update 2/", recipe) as job:
            for number in WARNINGS:
                job.send_signal(number)
            job.communicate(timeout=PATIENCE)
    finally:
        for number, handler in ignored.items():
            signal.signal(number, handler)
    assert job.returncode == 0
    assert left_behind(recipe).summary.status == "done"


def test_closed_terminal(tmp_path: Path):
    """The kernel sends SIGHUP, and each later write to the terminal fails."""
    recipe = endless(tmp_path)
    ours, terminal = pty.openpty()

    def adopt() -> None:
        os.setsid()
        os.close(os.open(os.ttyname(0), os.O_RDWR))  # the first terminal that a session opens controls it

    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    job = subprocess.Popen([*COMMAND, str(recipe)], **streams, cwd="/", env=ENVIRONMENT, preexec_fn=adopt)
    os.close(terminal)
    try:
        seen = b""
        while b"2/5000" not in seen:
            seen = seen[-10_000:] + os.read(ours, 10_000)
        os.close(ours)
        assert job.wait(PATIENCE) == 130
    finally:
        job.kill()
        job.wait()
    assert ended_in_order(recipe)
