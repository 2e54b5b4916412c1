"""Tests the command itself: what it runs, what it skips, how it is interrupted and continued."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import staleness
from omni_async.config import ConfigError
from tests.benchmarks.staleness_world import plan_in, record

ROOT = Path(__file__).parents[2]


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder of an experiment whose runs are fakes."""
    monkeypatch.setattr(staleness, "TRAIN", (sys.executable, "-m", "tests.benchmarks.fake_train"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return plan_in(tmp_path).out


def command(out: Path, *more: str) -> list[str]:
    """Returns the command for four cells, two updates each."""
    short = ["--updates", "2", "--seeds", "1", "--corrections", "none", "bypass", "--staleness", "0", "1"]
    return ["--recipe", str(out.parent / "recipe.yaml"), "--out", str(out), *short, *more]


def attempts(out: Path, cell: str) -> int:
    return len([path for path in (out / cell).iterdir() if path.is_dir()])


def is_free(out: Path) -> bool:
    try:
        with staleness._alone(out):
            return True
    except ConfigError:
        return False


def when(condition: Callable[[], object], act: Callable[[], None]) -> threading.Thread:
    """Acts as soon as the condition holds, beside the test."""

    def watch() -> None:
        for _ in range(4000):
            if condition():
                return act()
            time.sleep(0.05)
        return None

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_every_cell_is_run_once_and_reported(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert staleness.main(command(out, "--jobs", "2")) == 0
    printed = capsys.readouterr().out
    for position, cell in enumerate(("s0-none-seed0", "s0-bypass-seed0", "s1-none-seed0", "s1-bypass-seed0"), 1):
        assert f"{cell}: done in" in printed and f"{position}/4 " in printed
        assert attempts(out, cell) == 1
        log = (out / cell / "log.txt").read_text()
        assert "threads 1," in log
        assert "session of its own True" in log, "a terminal's Ctrl-C would reach it twice"
    assert "| 1 | bypass | 1 | 0.750 | 0.500 | 0.500 | 1.000 |" in printed
    assert (out / "report.md").read_text() in printed
    assert (out / "reward.png").stat().st_size > 5000
    assert json.loads((out / "results.json").read_text())["missing"] == []


def test_what_is_complete_is_not_run_again(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(plan_in(out.parent, updates=2).config(plan_in(out.parent).cells()[0]), [0.5, 0.5])
    assert staleness.main(command(out)) == 0
    assert "4 cells, 1 of them complete" in capsys.readouterr().out
    assert staleness.main(command(out)) == 0
    assert "done in" not in capsys.readouterr().out
    assert [attempts(out, cell) for cell in ("s0-none-seed0", "s1-bypass-seed0")] == [1, 1]
    assert staleness.main(command(out, "--corrections", "none", "trainer.optimizer.lr=0.5")) == 0
    assert [attempts(out, cell) for cell in ("s0-none-seed0", "s1-bypass-seed0")] == [2, 1]


def test_a_failed_cell_is_shown_and_the_others_go_on(out: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("FAKE_FAIL", "s0-none-seed0")
    assert staleness.main(command(out, "--jobs", "1")) == 1
    printed = capsys.readouterr().out
    assert "1/4 s0-none-seed0: FAILED with exit code 3" in printed
    assert "| line 39" in printed and "| line 25" in printed and "line 24" not in printed
    assert printed.count("done in") == 3
    assert "1 of 4 cells are not complete: s0-none-seed0" in printed
    monkeypatch.delenv("FAKE_FAIL")
    assert staleness.main(command(out)) == 0
    assert attempts(out, "s0-bypass-seed0") == 1


def test_ctrl_c_ends_the_runs_in_order_and_the_same_command_goes_on(out: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("FAKE_HANG", "s0-bypass-seed0")
    thread = when(lambda: list(out.glob("s0-bypass-seed0/*/summary.json")), lambda: os.kill(os.getpid(), signal.SIGINT))
    assert staleness.main(command(out, "--jobs", "1")) == 130
    thread.join()
    printed = capsys.readouterr().out
    assert "interrupted: waiting for 1 runs" in printed and "s0-bypass-seed0: cut off" in printed
    assert "heard SIGINT" in (out / "s0-bypass-seed0" / "log.txt").read_text()
    assert "3 of 4 cells are not complete: s0-bypass-seed0, s1-none-seed0, s1-bypass-seed0" in printed, (
        "what is done is reported"
    )
    assert not (out / "s1-none-seed0").exists()
    monkeypatch.delenv("FAKE_HANG")
    assert staleness.main(command(out)) == 0
    assert [attempts(out, cell) for cell in ("s0-none-seed0", "s0-bypass-seed0", "s1-none-seed0")] == [1, 2, 1]


def test_a_second_ctrl_c_kills(out: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("FAKE_STUBBORN", "s0-none-seed0")

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    thread = when(lambda: list(out.glob("s0-none-seed0/*/summary.json")), twice)
    assert staleness.main(command(out, "--jobs", "1")) == 130
    thread.join()
    printed = capsys.readouterr().out
    assert "interrupted: killing 1 runs" in printed
    assert "nothing to report" in printed


def test_no_more_than_jobs_run_at_a_time(out: Path, monkeypatch) -> None:
    # The first cell hangs, so with one job nothing else may start, and with two the others all end beside it.
    monkeypatch.setenv("FAKE_HANG", "s0-none-seed0")
    others = ("s0-bypass-seed0", "s1-none-seed0", "s1-bypass-seed0")
    done = [
        lambda: list(out.glob("s0-none-seed0/*/summary.json")),
        lambda: list(out.glob("s1-bypass-seed0/*/summary.json")),
    ]
    for jobs, condition in zip(("1", "2"), done, strict=True):
        thread = when(condition, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert staleness.main(command(out, "--jobs", jobs)) == 130
        thread.join()
        assert [(out / cell).exists() for cell in others] == [jobs == "2"] * 3


def test_two_experiments_do_not_share_a_folder(out: Path, monkeypatch, capsys) -> None:
    out.mkdir()
    with staleness._alone(out):
        assert staleness.main(command(out)) == 2
        assert "is in use" in capsys.readouterr().err
        assert staleness.main(command(out, "--report")) == 1, "but one may look"
    assert staleness.main(command(out, "--corrections", "none")) == 0


def test_runs_that_a_killed_experiment_left_behind_keep_the_folder(out: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("FAKE_HANG", "s0-none-seed0")
    program = (
        f"from benchmarks import staleness; staleness.TRAIN = {staleness.TRAIN!r};"
        f" staleness.main({command(out, '--jobs', '1')!r})"
    )
    driver = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.DEVNULL)
    when(lambda: list(out.glob("s0-none-seed0/*/summary.json")), driver.kill).join()
    assert driver.wait() == -signal.SIGKILL
    monkeypatch.delenv("FAKE_HANG")
    left = int((out / "s0-none-seed0" / "log.txt").read_text().split("pid ")[1].split(",")[0])
    assert staleness.main(command(out)) == 2
    assert "is in use by another experiment, or by runs that one left behind" in capsys.readouterr().err
    os.kill(left, signal.SIGINT)
    when(lambda: is_free(out), lambda: None).join()
    assert "heard SIGINT" in (out / "s0-none-seed0" / "log.txt").read_text()
    assert staleness.main(command(out)) == 0


def test_report_starts_nothing(out: Path, capsys) -> None:
    assert staleness.main(command(out, "--report")) == 1
    assert "no cell in" in capsys.readouterr().out
    assert not out.exists()
    plan = plan_in(out.parent, updates=2)
    record(plan.config(plan.cells()[0]), [0.5, 0.5])
    assert staleness.main(command(out, "--report")) == 0
    assert "3 of 4 cells are not complete" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {"s0-none-seed0", "report.md", "results.json", "reward.png"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["trainer.updates=5"], "use --updates"),
        (["trainer.updtes=5"], "unknown key"),
        (["model.path=/nowhere"], "is not a checkpoint folder"),
        (["--kappa-nats", "-1", "--corrections", "decoupled_kappa_tempered"], "kappa_nats: expected"),
        (["weights.publish_every=2", "--staleness", "1"], "publish_every"),
        (["--recipe", "nowhere.yaml"], "no such file"),
    ],
)
def test_a_wrong_configuration_is_one_line_and_starts_nothing(out: Path, capsys, more: list[str], message: str) -> None:
    assert staleness.main(command(out, *more)) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("staleness: ") and printed.err.count("\n") == 1
    assert message in printed.err
    assert not out.exists()


@pytest.mark.parametrize(
    "arguments", [["--staleness", "-1"], ["--seeds", "0"], ["--corrections", "magic"], ["nonsense"], ["--jobs", "x"]]
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as left:
        staleness.main(arguments)
    assert left.value.code == 2
    assert "usage: python -m benchmarks.staleness" in capsys.readouterr().err


def test_overrides_may_stand_anywhere() -> None:
    plan, jobs, report = staleness._parse(["--staleness", "0", "2", "a.b=1", "--jobs", "3", "c=[x, y]", "--report"])
    assert (plan.staleness, plan.extra, jobs, report) == ((0, 2), ("a.b=1", "c=[x, y]"), 3, True)


def test_the_examples_of_the_help_are_accepted(capsys) -> None:
    with pytest.raises(SystemExit) as left:
        staleness.main(["--help"])
    assert left.value.code == 0
    examples = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("  python -m benchmarks.staleness")
    ]
    assert len(examples) == 5
    for line in examples:
        staleness._parse(shlex.split(line, comments=True)[3:])


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(450)
def test_real_runs_are_interrupted_and_continued(tmp_path: Path) -> None:
    from pipelines.qwen_image.tiny import build
    from tests.e2e.runs import write_recipe

    recipe = write_recipe(tmp_path, str(build(tmp_path / "tiny", layers=1)))
    out = tmp_path / "out"
    driver = [
        sys.executable,
        "-m",
        "benchmarks.staleness",
        "--recipe",
        str(recipe),
        "--out",
        str(out),
        "--seeds",
        "1",
        "--jobs",
        "1",
    ]
    driver += [
        "--updates",
        "3",
        "--staleness",
        "1",
        "--corrections",
        "bypass",
        "decoupled_kappa_tempered",
        "--kappa-nats",
        "50",
    ]
    first, second = "s1-bypass-seed0", "s1-decoupled_kappa_tempered-seed0"
    with subprocess.Popen(driver, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        thread = when(lambda: list(out.glob(f"{second}/*/config.yaml")), lambda: process.send_signal(signal.SIGINT))
        printed, _ = process.communicate(timeout=200)
        thread.join()
    assert process.returncode == 130, printed
    assert f"1/2 {first}: done in" in printed and f"{second}: cut off" in printed
    done = subprocess.run(driver, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 cells, 1 of them complete" in done.stdout and f"2/2 {second}: done in" in done.stdout
    assert (attempts(out, first), attempts(out, second)) == (1, 2)
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert [row["correction"] for row in rows] == ["bypass", "decoupled_kappa_tempered"]
    for row in rows:
        mean = row["mean"]
        assert mean["staleness"] == pytest.approx(2 / 3), "0 in the first update, 1 in the next two"
        assert 0 < mean["ess"] <= 1 and mean["log_ratio_variance"] > 0
    assert [rows[1]["mean"][name] is not None for name in ("weight", "masked", "gamma")] == [True] * 3
    assert (out / "reward.png").exists()
