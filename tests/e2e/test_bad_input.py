"""Tests what a user gets to see of wrong input: one line that names the key, and the right exit code, from the real
command line."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from omni_async.checkpoint import read_state
from omni_async.cli import main
from tests.e2e.runs import check_every_group_ended_once, command_line, left_behind, started


def _unknown_key(folder: Path) -> str:
    _append(folder, "stalenes: {max_updates: 1}\n")
    return ""


def _malformed(folder: Path) -> str:
    _append(folder, "rollout: [1, 2\n")
    return ""


def _missing(folder: Path) -> str:
    (folder / "recipe.yaml").unlink()
    return ""


def _pipe(folder: Path) -> str:
    os.mkfifo(folder / "pipe.txt")
    return f"data.prompts={folder / 'pipe.txt'}"


def _append(folder: Path, text: str) -> None:
    path = folder / "recipe.yaml"
    path.write_text(path.read_text() + text)


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        pytest.param(_pipe, ("data.prompts", "pipe.txt", "a named pipe, not a file"), id="a pipe for prompts"),
        pytest.param(_unknown_key, ("stalenes: unknown key", "did you mean 'staleness'"), id="unknown key"),
        pytest.param(_malformed, ("recipe.yaml", "not valid YAML"), id="malformed YAML"),
        pytest.param(_missing, ("recipe.yaml: no such file",), id="missing recipe"),
        ("run.dir=/proc/runs", ("run.dir", "/proc/runs")),
        ("trainer.update=3", ("trainer.update: unknown key", "did you mean 'updates'")),
        ("trainer.updates", ("trainer.updates", "key.path=value")),
        ("rollout.sde.noise_level=loud", ("rollout.sde.noise_level", "'loud'")),
        ("rollout.sde.window.range=[0, 4]", ("rollout.sde.window.range", "got 4")),
        ("weights.publish_every=3", ("staleness.max_updates", "publish_every - 1 = 2")),
        ("algorithm.correction.kappa_nats=0.5", ("algorithm.correction.kappa_nats", "use mode: decoupled")),
        ("algorithm.name=mix_grpo", ("rollout.sde.window.schedule: mix_grpo",)),
        (
            "trainer.sequence_parallel=2",
            ("trainer.sequence_parallel: 2 ranks", "do not divide trainer.workers = 1", "use a divisor"),
        ),
    ],
)
def test_wrong_input_is_refused_in_one_line(
    recipe: Path, spoil: str | Callable[[Path], str], expected: tuple[str, ...]
) -> None:
    override = spoil if isinstance(spoil, str) else spoil(recipe.parent)
    answer = command_line(recipe, *filter(None, [override]))
    assert answer.code == 2, answer
    for text in expected:
        assert text in answer.line
    assert answer.stdout == ""


def test_a_bad_recipe_is_answered_before_anything_heavy_is_imported(recipe: Path) -> None:
    _unknown_key(recipe.parent)
    fastest = min((command_line(recipe) for _ in range(3)), key=lambda answer: answer.seconds)
    assert fastest.code == 2
    assert fastest.seconds < 1.0


@pytest.mark.parametrize(
    ("scorer", "reason"),
    [
        ("Constant", "zero reward variance"),
        ("AlwaysRaises", "OSError: the judge is out for lunch"),
    ],
)
def test_a_reward_without_signal_ends_the_run_and_says_so(
    recipe: Path, scorer: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    overrides = [
        f"reward.scorers=[{{name: 'tests.e2e.scorers:{scorer}'}}]",
        "staleness.max_updates=1",
        "reward.outage_s=0.2",
        "reward.backoff_s=0.05",
    ]
    code = main(["train", str(recipe), *overrides])
    said = capfd.readouterr()
    assert code == 1, said
    (line,) = said.err.splitlines()
    assert "the run failed" in line and reason in line
    finished = left_behind(recipe, overrides)
    assert finished.summary.status == "failed" and reason in finished.summary.reason and finished.summary.updates == 0
    check_every_group_ended_once(finished)
    rejected = [line for line in finished.ledger if line["event"] == "rejected"]
    assert rejected and all(reason in line["reason"] for line in rejected)
    assert sum(finished.summary.reject_reasons.values()) == len(finished.ledger)


def test_a_wrong_scorer_is_reported_in_its_own_words_before_anything_is_drawn(
    recipe: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    overrides = ["reward.scorers=[{name: 'tests.e2e.scorers:NotANumber'}]"]
    for command, expected in (("check", 2), ("train", 1)):
        code = main([command, str(recipe), *overrides])
        said = capfd.readouterr()
        assert code == expected, said
        (line,) = said.err.splitlines()
        assert (
            "scorer 'tests.e2e.scorers:NotANumber', sample 0 (prompt 0: 'the digit 7'): value is nan, expected a finite"
            " number" in line
        )
    finished = left_behind(recipe, overrides)
    assert (
        finished.summary.status == "failed"
        and finished.summary.reason is not None
        and "value is nan" in finished.summary.reason
    )
    assert finished.ledger == [], "no group was admitted"
    assert main(["check", str(recipe), *overrides, "--no-probe"]) == 0


def test_a_check_says_which_scorers_it_could_not_try_and_prints_a_recipe_all_the_same(
    recipe: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(recipe), "reward.scorers=[{name: 'tests.e2e.scorers:AlwaysRaises'}]"]) == 0
    said = capfd.readouterr()
    (line,) = said.err.splitlines()
    assert "may be an outage" in line and "OSError: the judge is out for lunch" in line
    assert "tests.e2e.scorers:AlwaysRaises" in said.out
    assert main(["check", str(recipe), "reward.scorers=[{name: 'tests.e2e.scorers:Talkative'}]"]) == 0
    said = capfd.readouterr()
    assert "hello" in said.err and "hello" not in said.out, "what a scorer prints is not part of the recipe"


def test_a_scorer_that_cannot_be_built_is_refused_in_one_line(recipe: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(recipe), "reward.scorers=[{name: 'tests.e2e.scorers:Unbuildable'}]"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "reward.scorers: scorer 'tests.e2e.scorers:Unbuildable' cannot be built: SystemExit: no licence" in line


@pytest.mark.thorough
def test_ctrl_c_leaves_a_checkpoint_to_continue_from(recipe: Path) -> None:
    overrides = ["trainer.updates=1000", "staleness.max_updates=1"]
    with started("update 3/", recipe, *overrides, stderr=subprocess.PIPE) as job:
        job.send_signal(signal.SIGINT)
        rest, errors = job.communicate(timeout=60)
    assert job.returncode == 130, errors
    assert errors == ""
    interrupted = left_behind(recipe, overrides)
    assert interrupted.summary.status == "interrupted" and interrupted.summary.updates >= 3
    check_every_group_ended_once(interrupted)
    assert all("interrupted" in line["reason"] for line in interrupted.ledger if line["event"] == "dropped")
    version = interrupted.summary.updates
    folder = interrupted.path / "checkpoints" / f"update-{version:06d}"
    state = read_state(folder)
    assert state.version == version and state.engine == {"optimizer_steps": version}
    assert str(interrupted.path) in rest, "a user learns where everything is"
    assert "checkpoint.resume=auto goes on with it" in rest

    copy = shutil.copytree(folder, recipe.parent / "copy")
    again = [*overrides[1:], f"trainer.updates={version + 2}"]
    answer = command_line(recipe, *again, "checkpoint.resume=auto")
    assert answer.code == 0 and answer.stderr == "", answer
    assert f"going on with {interrupted.path.name} from update {version}" in answer.stdout
    resumed = left_behind(recipe, again)
    assert resumed.path == interrupted.path and resumed.summary.updates == version + 2
    assert [line["update"] for line in resumed.metrics] == [*range(1, version + 3)]
    assert sorted(line["group"] for line in resumed.ledger) == [*range(2 * version + 4)], (
        "every group once, what was dropped included"
    )
    assert {line["event"] for line in resumed.ledger} == {"trained"}
    check_every_group_ended_once(resumed)

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
        rest, _ = job.communicate(timeout=60)
    assert job.returncode == 130, rest
    assert "Traceback" not in rest
    interrupted = left_behind(recipe, [])
    assert interrupted.summary.status == "interrupted" and interrupted.summary.conserved
