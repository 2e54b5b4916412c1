"""Tests signals to a whole job: after kill -9 it is resumed with nothing lost or done twice, and after SIGTERM there is
a checkpoint soon."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess

import psutil
import pytest
import torch

from omni_async.runtime.driver.control_socket import Request, ask
from tests.support.job_world import (
    COMMAND,
    ENVIRONMENT,
    left_behind,
    signal_group,
    slow_at,
    started,
    trained,
    write_emulated,
    write_recipe,
)
from tests.support.killed_job import Job
from tests.support.patience import PATIENCE


@pytest.mark.thorough
@pytest.mark.slow
def test_resumed_weights_are_the_uninterrupted_ones(checkpoint, tmp_path):
    """Compares to the bit, with AdamW and an average."""
    optimizer = ("trainer.updates=6", "trainer.optimizer={name: adamw, lr: 0.001}", "trainer.ema.every=1")
    settings = (*optimizer, "checkpoint.every=1", "checkpoint.keep=10")
    whole = trained(write_recipe(tmp_path / "whole", checkpoint), *settings)

    recipe, resumed = write_recipe(tmp_path / "killed", checkpoint), (*settings, "checkpoint.resume=auto")
    for update in (2, 4):
        with started(tuple(f"update {number}/" for number in range(update, 100)), recipe, *resumed) as job:
            # Without a checkpoint there would be nothing to go on from.
            while not any((recipe.parent / "runs").glob("*/checkpoints/update-*")):
                assert job.stdout is not None and job.stdout.readline(), "the job ended before its first checkpoint"
            os.killpg(job.pid, signal.SIGKILL)
            job.communicate(timeout=PATIENCE)
    killed = trained(recipe, *resumed).check_every_group_ended_once()  # the only run: it went on with the one before
    expected, found = whole.weights(), killed.weights()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert [line["reward"] for line in killed.metrics] == [line["reward"] for line in whole.metrics]


@pytest.mark.slow
@pytest.mark.parametrize("runtime", [pytest.param("ray", marks=pytest.mark.thorough), "inprocess"])
def test_a_preempted_run_leaves_a_checkpoint_in_time(tmp_path, runtime):
    """Stops the run in the middle of an update of 8 groups that takes 80 s, more than we wait for the end."""
    settings = (f"run.runtime={runtime}", "trainer.streaming=off", "trainer.updates=50", "checkpoint.every=50")
    recipe = write_emulated(tmp_path, slow_at("train", 10.0))
    job = Job(recipe, settings)

    def groups_are_ready() -> bool:
        status = ask(job.run / "control.sock", Request(), timeout_s=PATIENCE)
        return "buffers" in status and status["buffers"]["replay"]["ready"] >= 8

    signal_group(signal.SIGTERM, "groups are trained on when", recipe, *settings, once=groups_are_ready, after_s=1)
    run = left_behind(recipe)
    assert (run.summary.status, run.summary.updates, run.summary.conserved) == ("interrupted", 0, True)
    control = json.loads((run.path / "checkpoints" / "update-000000" / "state.json").read_text())["control"]
    assert control["version"] == 0 and len(control["ready"]) >= 8, "what the trainer had taken is kept"


@pytest.mark.slow
def test_preemption_while_loading(recipe):
    """Ray would take the signal for itself, and its processes would die of it."""
    signal_group(signal.SIGTERM, "loading engines", recipe, "run.runtime=ray", after_s=1)
    run = left_behind(recipe)
    assert (run.summary.status, run.summary.reason) == ("interrupted", "before the first update")
    assert not (run.path / "control.sock").exists()


@pytest.mark.slow
def test_a_killed_driver_leaves_no_process(tmp_path):
    recipe = write_emulated(tmp_path, slow_at("train", 0.05))
    settings = ("run.runtime=ray", "trainer.updates=100000", "checkpoint.every=1", "checkpoint.resume=auto")
    gone, alive = psutil.wait_procs(signal_group(signal.SIGKILL, "update 2/", recipe, *settings), timeout=PATIENCE)
    assert len(gone) > 5 and not alive, [process.name() for process in alive]

    _, alive = psutil.wait_procs(signal_group(signal.SIGTERM, "starting Ray", recipe, *settings), timeout=PATIENCE)
    assert not alive, [process.name() for process in alive]
    first, *resumed_anew = sorted((tmp_path / "runs").iterdir())
    assert len(resumed_anew) <= 1, "it starts over in a folder of its own if no checkpoint was complete at the kill"
    assert not any((run / "control.sock").exists() for run in (first, *resumed_anew))
    assert (first / "checkpoints").exists()


@pytest.mark.slow
def test_a_terminal_that_closes(tmp_path):
    """The kernel sends SIGHUP, and each later write to the terminal fails."""
    recipe = write_emulated(tmp_path, slow_at("step", 0.2), trainer={"updates": 5000, "groups_per_update": 2})
    ours, terminal = pty.openpty()

    def adopt() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
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
    run = left_behind(recipe)
    assert run.summary.status == "interrupted" and run.summary.updates > 0
    assert [*run.path.glob("checkpoints/update-*/state.json")]
