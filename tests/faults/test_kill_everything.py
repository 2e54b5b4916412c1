"""Tests kill -9 of a whole job, at random moments and at chosen ones: what goes on from the checkpoint is the same job,
with nothing lost or done twice."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from benchmarks.kill_everything import RECIPE, Job, main, problems
from tests.e2e.runs import check_every_group_ended_once, command_line, left_behind, started, write_recipe

UPDATES = 60
QUICK = ["emulation.time_scale=0.001", f"trainer.updates={UPDATES}", "checkpoint.every=7"]


@pytest.mark.sliced(floor=1)
@pytest.mark.parametrize(("seed", "settings"), [(0, ["buffer.window=2"]), (1, ["staleness.max_updates=0"])])
def test_a_job_that_is_killed_again_and_again_trains_every_group_once(
    tmp_path: Path, seed: int, settings: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    overrides = [*QUICK, *settings, "run.runtime=inprocess"]
    arguments = ["--kills", "4", "--within", "1.5", "--seed", str(seed), "--out", str(tmp_path / "runs")]
    assert main([*arguments, "--recipe", str(RECIPE), *overrides]) == 0, capfd.readouterr()
    assert "4 kills, 60 updates" in capfd.readouterr().out
    job = Job(RECIPE, [*overrides, f"run.dir={tmp_path / 'runs'}"])
    assert (job.run / "ledger.jsonl.void").read_bytes(), "updates after a checkpoint were done again"
    summary = json.loads((job.run / "summary.json").read_text())
    assert (summary["updates"], summary["conserved"], summary["status"]) == (UPDATES, True, "done")
    assert sum(summary["staleness"].values()) == summary["counters"]["trained"] == UPDATES * 32

    # And it would have been noticed.
    ledger = job.run / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    for tampered, said in (
        (lines[:-1], "were not made of 32 groups"),
        (lines[:-1], "the ledger has 1919 lines, the checkpoint counts 1920"),
        ([*lines, lines[5]], "1921 lines for groups 0 to 1919, 1920 of them different"),
        ([*lines[:5], lines[6], lines[5], *lines[7:]], "are not those that the checkpoint counts"),
        ([*lines[:5], b"\n", *lines[5:]], "ledger.jsonl, line 6: "),
    ):
        ledger.write_bytes(b"".join(tampered))
        assert any(said in problem for problem in problems(job))


@pytest.mark.slow
def test_without_staleness_the_resumed_weights_are_the_uninterrupted_ones(checkpoint: str, tmp_path: Path) -> None:
    """Compares to the bit, with AdamW and an average."""
    settings = [
        "trainer.updates=6",
        "trainer.optimizer.name=adamw",
        "trainer.optimizer.lr=0.001",
        "trainer.ema.every=1",
        "checkpoint.every=1",
        "checkpoint.keep=10",
    ]
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    recipe = write_recipe(tmp_path / "whole", checkpoint)
    answer = command_line(recipe, *settings)
    assert answer.code == 0, answer
    whole = left_behind(recipe, settings)

    recipe = write_recipe(tmp_path / "killed", checkpoint)
    for update in (2, 4):
        kill_at([recipe, *settings, "checkpoint.resume=auto"], tmp_path / "killed" / "runs", update)
    answer = command_line(recipe, *settings, "checkpoint.resume=auto")
    assert answer.code == 0 and "going on with" in answer.stdout, answer
    killed = left_behind(recipe, settings)
    check_every_group_ended_once(killed)
    expected, found = whole.weights(), killed.weights()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert [line["reward"] for line in killed.metrics] == [line["reward"] for line in whole.metrics]


def kill_at(arguments: list[str | Path], runs: Path, update: int) -> None:
    """Runs the command and kills its whole session after that update or a later one, once there is a checkpoint:
    without one there would be nothing to go on from."""
    reached = tuple(f"update {number}/" for number in range(update, 100))
    with started(reached, *arguments) as job:
        assert job.stdout is not None
        while not any(runs.glob("*/checkpoints/update-*")):
            assert job.stdout.readline(), "the job ended before its first checkpoint"
        os.killpg(job.pid, signal.SIGKILL)
        job.communicate(timeout=30)
