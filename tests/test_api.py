"""Tests the Python API: runs with a reward of Python code, callbacks, what a run tells, and one line for bad input."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from PIL import Image

import omni_async
from omni_async import cli
from omni_async.rewards import functions
from tests.e2e.scorers import Brightness
from tests.support.job_world import ENVIRONMENT, slow_at, write_emulated
from tests.support.patience import PATIENCE, wait_for
from tests.support.places import ROOT

READ_DIGITS = ROOT / "recipes" / "quickstart" / "read_digits" / "read_digits.yaml"


def brightness(images: Any, prompts: Any) -> list[float]:
    return [round(float(image.mean()) / 255, 3) for image in images]


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "_passed", {})


@pytest.fixture
def emulated(tmp_path: Path) -> Path:
    """Writes a recipe whose devices take no time to speak of."""
    return write_emulated(tmp_path, slow_at("train", 0.01), trainer={"updates": 3, "groups_per_update": 2})


def said_by(program: str, folder: Path, code: int = 0) -> list[str]:
    """Runs a script in a process of its own; returns the lines of its output, or of its errors."""
    (folder / "script.py").write_text(textwrap.dedent(program))
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=folder, env=ENVIRONMENT)
    assert done.returncode == code, done
    return (done.stdout if code == 0 else done.stderr).splitlines()


def in_a_loop(call: Callable[[], Any]) -> Any:
    """Calls it where an event loop runs, as a notebook does."""

    async def main() -> Any:
        return call()

    return asyncio.run(main())


def test_importing_the_package_stays_light(tmp_path: Path) -> None:
    program = """
        import sys
        import omni_async
        assert "train" in dir(omni_async)
        assert not {"torch", "ray", "numpy", "msgspec"} & sys.modules.keys()
        omni_async.train
        assert not {"torch", "ray"} & sys.modules.keys()
    """
    assert said_by(program, tmp_path) == []


# ---- a run -----------------------------------------------------------------------------------------------------------


def test_a_lambda_in_a_running_loop(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trains from a mapping, as in a notebook, and compares with the same reward as a class of the command line."""
    lines: list[Any] = []
    changes = {"trainer.updates": 2, "checkpoint.every": 1, "run.dir": recipe.parent / "own"}
    tree = {"extends": str(recipe), "validation": {"prompts": str(recipe.parent / "prompts.txt")}}
    reward = lambda images, prompts: brightness(images, prompts)  # noqa: E731
    callbacks = [lambda run, line: lines.append((run.path, line))]
    run = in_a_loop(lambda: omni_async.train(tree, changes, reward=reward, callbacks=callbacks))
    out = capsys.readouterr().out
    assert "python:lambda has no import path: only omni_async.train(..., reward=...) from Python resumes the run" in out
    assert run.status()["status"] == "done" and run.wait() is run and run.path.parent == recipe.parent / "own"
    assert isinstance(run.metrics, pd.DataFrame) and run.metrics["update"].tolist() == [1, 2]
    assert run.validation["update"].tolist() == [0, 2]
    assert {path for path, _ in lines} == {run.path}
    updates = [line for _, line in lines if "reward" in line]
    assert [line["reward"] for line in updates] == run.metrics["reward"].tolist()
    assert len(lines) == len(updates) + len(run.validation)
    assert run.config.reward.scorers[0].name == "python:lambda"

    functions._passed.clear()  # as in another process
    again = [str(run.path / "config.yaml"), f"checkpoint.resume={run.path}", "trainer.updates=3"]
    assert cli.main(["train", *again]) == 2
    refused = capsys.readouterr().err
    assert refused.count("\n") == 1
    assert "python:lambda" in refused and "no import path; pass it as reward= from Python again" in refused
    resumed = omni_async.train(again[0], again[1:], reward=reward)
    assert resumed.path == run.path and run.metrics["update"].tolist() == [1, 2, 3]
    assert omni_async.train(again[0], again[1:], reward=reward).path == run.path, "nothing to do"
    assert "is done, nothing to do" in capsys.readouterr().out

    named = f"reward.scorers=[{{name: '{Brightness.__module__}:Brightness'}}]"
    other = omni_async.train(tree, ["trainer.updates=2", f"run.dir={recipe.parent / 'named'}", named])
    assert other.metrics["reward"].tolist() == run.metrics["reward"].tolist()[:2]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_script_with_a_lambda_on_ray(recipe: Path) -> None:
    program = f"""
        import omni_async

        darkest = 0.1
        reward = lambda images, prompts: [float(image.mean()) / 255 - darkest for image in images]
        run = omni_async.train({str(recipe)!r}, "run.runtime=ray", reward=reward)
        print("finally", run.status()["status"], len(run.metrics), run.metrics["reward"].abs().max() < 1)
    """
    assert said_by(program, recipe.parent)[-1] == "finally done 3 True"


def test_a_run_in_the_background(emulated: Path) -> None:
    with pytest.raises(TimeoutError, match=r"is not over after 0.01 s"):
        run = omni_async.train(emulated, {"trainer.updates": 100_000}, wait=False)
        assert run.path.parent == emulated.parent / "runs"
        with pytest.raises(omni_async.ConfigError, match=r"^another run of this process is not over"):
            omni_async.train(emulated)
        run.wait(0.01)
    wait_for(lambda: run.status().get("progress", {}).get("update", 0) > 0, "an update")
    other = omni_async.load_run(run.path)
    assert run.status()["status"] == other.status()["status"] == "running"
    other.stop()
    assert run.wait(PATIENCE).status()["status"] == other.wait().status()["status"] == "interrupted"
    run.stop()
    assert 0 < len(run.metrics) < 100_000


def test_ctrl_c_while_waiting_stops_in_order(emulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = omni_async.train(emulated, ["trainer.updates=100000"], wait=False)
    sleep, pressed = time.sleep, [KeyboardInterrupt()]

    def interrupted(seconds: float) -> None:
        if pressed and threading.current_thread() is threading.main_thread():
            raise pressed.pop()
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", interrupted)
    assert run.wait(PATIENCE).status()["status"] == "interrupted"


def test_a_callback_ends_a_run_early(emulated: Path) -> None:
    def enough(run: omni_async.Run, line: Any) -> None:
        if line["update"] == 2:
            run.stop()

    run = omni_async.train(emulated, ["trainer.updates=100000"], callbacks=[enough])
    assert run.status()["status"] == "interrupted" and len(run.metrics) >= 2


@pytest.mark.parametrize("at", [1, 3])
def test_a_callback_that_raises_fails_the_run(emulated: Path, at: int) -> None:
    def strict(run: Any, line: Any) -> None:
        if line["update"] == at:
            raise ValueError("too low")

    with pytest.raises(
        omni_async.RunFailed, match=r"^the run failed: callback 'strict': ValueError: too low \(.*:\d+\)$"
    ):
        omni_async.train(emulated, callbacks=[strict])
    [path] = (emulated.parent / "runs").iterdir()
    assert omni_async.load_run(path).status()["status"] == "failed"


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda it: omni_async.train("no/such.yaml"), "^no/such.yaml: no such file$"),
        (lambda it: omni_async.train({"modell": {}}), "^the recipe: .*modell: unknown key; did you mean 'model'"),
        (
            lambda it: omni_async.train({"model": {"path": object()}}),
            "^the recipe: a value is of type object; expected",
        ),
        (lambda it: omni_async.train(it, "trainer.updats=3"), "trainer.updats: unknown key; did you mean 'updates'"),
        (lambda it: omni_async.train(it, {"trainer.updates": object()}), "override 'trainer.updates': .*object"),
        (lambda it: omni_async.train(it, {"trainer.updates": float("nan")}), "trainer.updates: expected"),
        (lambda it: omni_async.train(it, reward=3), "^reward: expected a function"),
        (lambda it: omni_async.train(it, reward={"light": brightness, "n": 3}), "^reward: n: expected a function"),
        (lambda it: omni_async.train(it, reward={}), "^reward: expected at least one reward"),
        (lambda it: omni_async.train(it, reward_weights={"light": 2}), "^reward_weights: needs several rewards"),
        (lambda it: omni_async.score(it, ".", reward=brightness, reward_weights={}), "^reward_weights: needs several"),
        (
            lambda it: omni_async.train(it, reward={"light": brightness}, reward_weights={"dark": 2}),
            "^reward_weights: 'dark' is no name of reward, which has light$",
        ),
        (lambda it: omni_async.simulate(it, changes=True, sweep=True), "^sweep: not for changes"),
        (lambda it: omni_async.simulate(Path(it).parent, sweep=True), "^sweep: not for the folder of a run"),
        (lambda it: omni_async.train(it, reward=lambda images: []), r"reward.scorers.0: .*takes \(images\), expected"),
        (lambda it: omni_async.train(it, callbacks=[print, lambda run: 0]), "callbacks: 'lambda': expected a function"),
        (lambda it: omni_async.load_run(Path(it).parent), "is not a run folder$"),
        (lambda it: omni_async.simulate(it), "profile: required"),
        (lambda it: omni_async.score(it, "no/such.png", reward=brightness), "no/such.png"),
    ],
)
def test_bad_input_is_one_line(recipe: Path, call: Callable[[str], Any], error: str) -> None:
    with pytest.raises(omni_async.ConfigError) as refused:
        call(str(recipe))
    assert re.search(error, str(refused.value)) and "\n" not in str(refused.value), refused.value
    assert not (recipe.parent / "runs").exists()


def test_a_wrong_reward_ends_the_run_in_one_line(recipe: Path) -> None:
    said = r"^the run failed: .*'python:lambda'.* returned None \(is its `return` missing\?\)"
    with pytest.raises(omni_async.RunFailed, match=said) as failed:
        omni_async.train(recipe, reward=lambda images, prompts: None)
    assert "\n" not in str(failed.value)


def test_a_reward_that_no_process_can_receive(recipe: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(
        omni_async.ConfigError, match=r"python:lambda cannot be pickled .*: TypeError: .*lock.*inprocess"
    ):
        omni_async.train(recipe, "run.runtime=ray", reward=lambda images, prompts: [lock])
    assert not (recipe.parent / "runs").exists()


# ---- scores and simulations ------------------------------------------------------------------------------------------


def test_scores_are_those_of_the_command(recipe: Path) -> None:
    folder = recipe.parent / "images"
    folder.mkdir()
    for red in (10, 200):
        Image.fromarray(np.full((4, 4, 3), (red, 0, 0), np.uint8)).save(folder / f"{red}.png")
    reward = lambda images, prompts: brightness(images, prompts)  # noqa: E731
    found = in_a_loop(lambda: omni_async.score(recipe, folder, reward=reward))
    own, out = f"reward.scorers=[{{name: '{Brightness.__module__}:Brightness'}}]", recipe.parent / "scores.json"
    command = [sys.executable, "-m", "omni_async.cli", "score", str(recipe), str(folder), own, "--json", str(out)]
    subprocess.run(command, check=True, capture_output=True, env=ENVIRONMENT, cwd="/")
    assert found["reward"].tolist() == [row["reward"] for row in json.loads(out.read_text())["rows"]] == [0.013, 0.261]


def exact(answers: Any, prompts: Any) -> list[float]:
    return [float(one.text == prompt.target) for one, prompt in zip(answers, prompts, strict=True)]


exact.accepts = ("text",)  # type: ignore[attr-defined]


def test_answers_are_scored_by_a_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    rows = [{"prompt": "1 + 1", "target": "2", "text": text} for text in ("2", "two")]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(omni_async.ConfigError, match=r"accepts image .* but the samples are text; .* NAME\.accepts"):
        omni_async.score(READ_DIGITS, tmp_path / "answers.jsonl", reward=lambda *both: exact(*both))
    for reward in (exact, "exact_match"):
        found = omni_async.score(READ_DIGITS, tmp_path / "answers.jsonl", reward={"own": reward})
        assert found["reward"].tolist() == [1.0, 0.0] and found["answer"].tolist() == ["2", "two"]
    out = ["--json", str(tmp_path / "scores.json")]
    assert cli.main(["score", str(READ_DIGITS), str(tmp_path / "answers.jsonl"), *out]) == 0
    assert re.search(r"worst .* 1 \+ 1 .* two ", capsys.readouterr().out)


@pytest.mark.thorough
def test_a_thinker_learns_from_a_function(tmp_path: Path) -> None:
    changes = {"run.dir": tmp_path, "trainer.updates": 2, "trainer.groups_per_update": 2, "validation.share": 0.02}
    run = in_a_loop(lambda: omni_async.train(READ_DIGITS, changes, reward=exact))
    assert run.status()["status"] == "done" and run.metrics["update"].tolist() == [1, 2]
    assert "answers/s" in (run.path / "logs" / "driver.log").read_text()
    assert cli.main(["report", str(run.path)]) == 0 and "exact" in (run.path / "report.html").read_text()


def test_several_rewards_are_weighted_by_their_names(recipe: Path) -> None:
    """Compares a run of two lambdas and a scorer with the weighted sum of what each gives."""
    rewards = {
        "light": lambda images, prompts: brightness(images, prompts),
        "half": lambda images, prompts: [value / 2 for value in brightness(images, prompts)],
        "size": "jpeg_size",
    }
    weights = {"half": 3.0, "size": 0.0}
    run = omni_async.train(recipe, {"trainer.updates": 1}, reward=rewards, reward_weights=weights)
    scorers = run.config.reward.scorers
    assert [one.name for one in scorers] == ["python:light", "python:half", "jpeg_size"]
    assert [one.weight for one in scorers] == [1.0, 3.0, 0.0]
    (folder := recipe.parent / "images").mkdir()
    Image.fromarray(np.full((4, 4, 3), (200, 0, 0), np.uint8)).save(folder / "red.png")
    found = omni_async.score(recipe, folder, reward=rewards, reward_weights=weights)
    assert found["reward"].tolist() == [pytest.approx(0.261 + 3 * 0.1305)]


def test_a_sweep_is_that_of_the_command(emulated: Path) -> None:
    out = emulated.parent / "simulated.json"
    assert cli.main(["simulate", str(emulated), "--sweep", "--updates", "40", "--json", str(out)]) == 0
    found = omni_async.simulate(emulated, updates=40, sweep=True)
    rows = {row["name"]: row["step_s"] for row in json.loads(out.read_text())["results"]}
    assert {name: one.step_s for name, one in found.results.items()} == rows and {"sync", "async S=8"} < {*rows}
    assert found.left_out == {}


def test_simulations_are_those_of_the_command(emulated: Path) -> None:
    out = emulated.parent / "simulated.json"
    assert cli.main(["simulate", str(emulated), "--updates", "20", "--json", str(out)]) == 0
    tree = {"extends": str(emulated)}
    found = omni_async.simulate(tree, updates=20)
    assert found.step_s == json.loads(out.read_text())["results"][0]["step_s"]
    assert yaml.safe_load(emulated.read_text())["trainer"]["updates"] == 3
    with pytest.raises(omni_async.ConfigError, match=r"^updates: a simulation"):
        omni_async.simulate(tree, updates=1)
    with pytest.raises(omni_async.ConfigError, match=r"^updates: not for changes"):
        omni_async.simulate(tree, updates=40, changes=True)
