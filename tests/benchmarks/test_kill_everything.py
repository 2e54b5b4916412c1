"""Tests that a job which is killed again and again trains every group once, and that a wrong ledger is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.kill_everything import RECIPE, main
from tests.support.killed_job import Job, problems

UPDATES = 60
# A quarter of the recipe's samples in a group: most of the time goes by samples.
QUICK = ["emulation.time_scale=0.001", f"trainer.updates={UPDATES}", "checkpoint.every=12", "rollout.group_size=4"]


@pytest.mark.parametrize(
    ("seed", "settings"),
    [(0, ["buffer.window=2"]), pytest.param(1, ["staleness.max_updates=0"], marks=pytest.mark.thorough)],
)
def test_killed_jobs_train_groups_once(
    tmp_path: Path, seed: int, settings: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    overrides = [*QUICK, *settings, "run.runtime=inprocess"]
    arguments = ["--kills", "2", "--within", "1.5", "--seed", str(seed), "--out", str(tmp_path / "runs")]
    assert main([*arguments, "--recipe", str(RECIPE), *overrides]) == 0, capfd.readouterr()
    assert "2 kills, 60 updates" in capfd.readouterr().out
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
        ([*lines[:5], lines[6], lines[5], *lines[7:]], "differ from the lines that the checkpoint counts"),
        ([*lines[:5], b"\n", *lines[5:]], "ledger.jsonl, line 6: "),
    ):
        ledger.write_bytes(b"".join(tampered))
        assert any(said in problem for problem in problems(job))
