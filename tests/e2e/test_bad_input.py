"""Tests runs without a usable reward, and runs that Ctrl-C ends: one line of error, and the right exit code."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from omni_async.checkpoint import read_state
from omni_async.cli import main
from tests.support.job_world import command_line, left_behind, started
from tests.support.patience import PATIENCE


def scored_by(name: str) -> str:
    return f"reward.scorers=[{{name: 'tests.e2e.scorers:{name}'}}]"


@pytest.mark.parametrize(
    ("scorer", "reason"),
    [("Constant", "zero reward variance"), ("AlwaysRaises", "OSError: the judge is out for lunch")],
)
def test_a_reward_without_signal(recipe: Path, scorer: str, reason: str, capfd: pytest.CaptureFixture[str]) -> None:
    overrides = [scored_by(scorer), "staleness.max_updates=1", "reward.outage_s=0.2", "reward.backoff_s=0.05"]
    assert main(["train", str(recipe), *overrides]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "the run failed" in line and reason in line
    finished = left_behind(recipe, overrides).check_every_group_ended_once()
    assert finished.summary.status == "failed" and reason in finished.summary.reason and finished.summary.updates == 0
    rejected = [line for line in finished.ledger if line["event"] == "rejected"]
    assert rejected and all(reason in line["reason"] for line in rejected)
    reasons = [finished.summary.reject_reasons, finished.summary.drop_reasons or {}]
    assert sum(sum(each.values()) for each in reasons) == len(finished.ledger)


def test_a_wrong_scorer(recipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wrong = scored_by("NotANumber")
    for command, expected in (("check", 2), ("train", 1)):
        assert main([command, str(recipe), wrong]) == expected
        (line,) = capfd.readouterr().err.splitlines()
        assert "scorer 'tests.e2e.scorers:NotANumber', sample 0 (prompt 0: 'the digit 7'): value is nan, expe" in line
    finished = left_behind(recipe, [wrong])
    assert finished.summary.status == "failed" and "value is nan" in (finished.summary.reason or "")
    assert finished.ledger == [], "no group was admitted"
    assert main(["check", str(recipe), wrong, "--no-probe"]) == 0


def test_check_names_scorers_that_fail(recipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(recipe), scored_by("AlwaysRaises")]) == 0, "it may be down"
    said = capfd.readouterr()
    (line,) = said.err.splitlines()
    assert "it may be down" in line and "OSError: the judge is out for lunch" in line
    assert "tests.e2e.scorers:AlwaysRaises" in said.out
    assert main(["check", str(recipe), scored_by("Unbuildable")]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "reward.scorers: scorer 'tests.e2e.scorers:Unbuildable' cannot be built: SystemExit: no licence" in line


@pytest.mark.thorough
def test_ctrl_c_leaves_a_checkpoint(recipe: Path) -> None:
    overrides = ["trainer.updates=1000", "staleness.max_updates=1"]
    with started("update 3/", recipe, *overrides, stderr=subprocess.PIPE) as job:
        job.send_signal(signal.SIGINT)
        rest, errors = job.communicate(timeout=PATIENCE)
    assert (job.returncode, errors) == (130, "")
    interrupted = left_behind(recipe, overrides).check_every_group_ended_once()
    assert interrupted.summary.status == "interrupted" and interrupted.summary.updates >= 3
    assert all("interrupted" in line["reason"] for line in interrupted.ledger if line["event"] == "dropped")
    version = interrupted.summary.updates
    folder = interrupted.path / "checkpoints" / f"update-{version:06d}"
    state = read_state(folder)
    assert state.version == version == state.engine["optimizer_steps"]
    assert str(interrupted.path) in rest and "checkpoint.resume=auto resumes it" in rest

    copy = shutil.copytree(folder, recipe.parent / "copy")
    again = [*overrides[1:], f"trainer.updates={version + 2}"]
    answer = command_line(recipe, *again, "checkpoint.resume=auto")
    assert answer.code == 0 and answer.stderr == "", answer
    assert f"continuing {interrupted.path.name} from update {version}" in answer.stdout
    resumed = left_behind(recipe, again).check_every_group_ended_once()
    assert resumed.path == interrupted.path and resumed.summary.updates == version + 2
    assert [line["update"] for line in resumed.metrics] == [*range(1, version + 3)]
    # Every group once, what was dropped included.
    assert sorted(line["group"] for line in resumed.ledger) == [*range(2 * version + 4)]
    assert {line["event"] for line in resumed.ledger} == {"trained"}

    shutil.rmtree(recipe.parent / "runs")
    answer = command_line(recipe, *again, f"checkpoint.resume={copy}")
    assert answer.code == 0 and answer.stderr == "", answer
    anew = left_behind(recipe, again)
    assert anew.path.name != resumed.path.name
    assert [line["update"] for line in anew.metrics] == [version + 1, version + 2]
    assert [line["trained_version"] for line in anew.ledger] == [version + 1] * 2 + [version + 2] * 2


def test_ctrl_c_while_the_model_loads(recipe: Path) -> None:
    with started("loading", recipe) as job:
        job.send_signal(signal.SIGINT)
        rest, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 130, rest
    assert "Traceback" not in rest
    interrupted = left_behind(recipe)
    assert interrupted.summary.status == "interrupted" and interrupted.summary.conserved
