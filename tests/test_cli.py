"""Tests the command line: what it teaches, what it refuses, and which exit code says so."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import omni_async
from omni_async import cli
from omni_async.algorithms.registry import find_objective, objective_names
from omni_async.commands import check
from omni_async.commands.list_names import LISTED
from omni_async.config import load
from omni_async.performance.profile import write_profile
from omni_async.plugins.families import family_names
from omni_async.records.write.sinks.base import SinkUnusableError
from omni_async.rewards import registry
from omni_async.runtime.driver import train as runtime
from tests.runtime.runtime_world import write_world
from tests.simulation.tune import tune_world
from tests.support.patience import PATIENCE
from tests.support.places import ROOT

QUICKSTART = str(ROOT / "recipes" / "quickstart" / "quickstart.yaml")


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    write_world(tmp_path)
    return str(tmp_path / "recipe.yaml")


# ---- what it teaches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--version", f"omni-async {omni_async.__version__}\n"),
        ("--help", "usage: omni-async [-h] [--version] COMMAND ..."),
        ("train --help", "key.path=value"),
    ],
)
def test_version_and_help(arguments, said, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(arguments.split())
    assert left.value.code == 0 and said in capsys.readouterr().out


def test_list(capsys):
    assert cli.main(["list"]) == 0
    shown = capsys.readouterr().out
    lines = {line[:16].strip(): line[16:] for line in shown.splitlines() if not line.startswith(" ")}
    names = ["model families", "engines", "backends", "transitions", "scorers", "roles", "programs", "algorithms"]
    assert list(lines) == names
    assert lines["engines"] == "vllm_omni, diffusers, vllm, transformers, emulated"
    assert lines["backends"] == "fsdp2, plain"
    assert lines["transitions"] == "flow, cps, dance"
    assert lines["scorers"] == ", ".join(registry.names())

    families, *_ = shown.partition("\nengines")
    heading, *rows = (re.split(r"\s{2,}", line.strip()) for line in families.splitlines())
    assert heading == ["model families", "media", "components", "engines", "batching"]
    assert [name for name, *_ in rows] == list(family_names())
    for family in ("qwen_image", "stable_diffusion_3"):
        assert [family, "image", "transformer", "vllm_omni, diffusers", "step, request"] in rows

    *_, algorithms = shown.partition("\nalgorithms\n")
    rows = dict(line.strip().split(maxsplit=1) for line in algorithms.splitlines())
    assert [*rows.items()] == [(name, find_objective(name).summary) for name in objective_names()]
    assert all(cli.main(["list", part]) == 0 for part in LISTED[:-1])
    assert capsys.readouterr().out == shown, "its parts, one at a time"


def test_list_recipes(recipe, tmp_path, monkeypatch, capsys):
    """Lists recipes of the working directory, else the package's: those of the repository, or of a wheel."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["list", "recipes"]) == 0
    heading, *rows = (re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines())
    assert heading == ["recipe", "family", "algorithm", "reward", "S", "devices", "time"]
    found = {str(Path(row[0]).relative_to(ROOT / "recipes")): row[1:] for row in rows}
    assert found.keys() == {str(path.relative_to(ROOT / "recipes")) for path in (ROOT / "recipes").rglob("*.yaml")}
    assert found["quickstart/quickstart.yaml"] == ["qwen_image", "flow_grpo", "ocr", "2", "none", "about 4 minutes"]
    assert found["qwen_image_ocr/flow_grpo_lora_judge.yaml"][3:] == ["2", "9"]
    assert found["emulated/remote_judge.yaml"][2:] == ["a profile's", "2", "2 emulated"]  # whose header names a latency
    assert found["quickstart/algorithms/diffusion_dpo_offline.yaml"][2:4] == ["preference pairs", "any"]

    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "broken.yaml").write_text("trainer: {updtes: 1}")
    assert cli.main(["list", "recipes"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("recipes/broken.yaml: cannot be used: trainer.updtes")
    package = tmp_path / "site-packages" / "omni_async"
    package.mkdir(parents=True)
    (tmp_path / "recipes").rename(package / "recipes")
    monkeypatch.setattr(omni_async, "__file__", str(package / "__init__.py"))
    assert cli.main(["list", "recipes"]) == 0
    assert f"{package}/recipes/broken.yaml: cannot be used" in capsys.readouterr().out


# ---- check -----------------------------------------------------------------------------------------------------------


def test_check_prints_the_configuration(recipe, tmp_path, capsys):
    assert cli.main(["check", recipe, "staleness.max_updates=3"]) == 0
    shown = capsys.readouterr().out
    resolved = tmp_path / "elsewhere" / "resolved.yaml"
    resolved.parent.mkdir()
    resolved.write_text(shown)
    assert load(resolved) == load(recipe, ["staleness.max_updates=3"])
    assert yaml.safe_load(shown)["trainer"]["optimizer"]["name"] == "adamw"  # every default is there


def test_check_ends_with_a_verdict(recipe, monkeypatch, capsys):
    """The warnings that it counts are printed just before; phases are only for a terminal."""
    assert cli.main(["check", recipe, "staleness.max_updates=1"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[-2:] == [
        "# ready to run, with no warnings: 4 updates of 2 groups x 2 samples, each at most S = 1 update old",
        "# workers on 3 CPUs: rollout 1, reward 1, trainer 1",
    ]
    assert said.err == ""
    monkeypatch.setattr(sys, "stdout", both := _Terminal())
    monkeypatch.setattr(sys, "stderr", both)
    assert cli.main(["check", recipe, f"validation={{prompts: {Path(recipe).with_name('prompts.txt')}}}"]) == 0
    first, second, third, *_, warning, ready, workers = both.getvalue().splitlines()
    assert first == "omni-async: reading and checking the prompts in prompts.txt"
    assert second == "omni-async: reading and checking the validation prompts in prompts.txt"
    assert third == "omni-async: trying the scorers"
    assert warning.startswith("omni-async: warning: validation.prompts: 2 of 2 prompts are in data.prompts too")
    assert ready.startswith("# ready to run, with 1 warning: ") and workers.startswith("# workers on ")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("name", "ready", "workers"),
    [
        ("emulated/qwen_image_lora_h800.yaml", "groups x ", "emulated accelerators: rollout "),
        ("quickstart/algorithms/diffusion_dpo_offline.yaml", " preference pairs", "CPUs: reader 1, trainer 1"),
    ],
)
def test_the_verdict_on_other_jobs(name, ready, workers):
    first, second = check._verdict(load(ROOT / "recipes" / name), 2)
    assert first.startswith("# ready to run, with 2 warnings: ") and ready in first and workers in second


def test_check_does_not_print_a_scorers_output(tmp_path, monkeypatch, capsys):
    scores = "class X:\n    def score(self, images, prompts): return [Score(value=0.5)] * len(images)\n"
    (tmp_path / "printing_scorer.py").write_text(f"print('hello')\nfrom omni_async.types import Score\n{scores}")
    monkeypatch.chdir(tmp_path)
    write_world(tmp_path, reward={"scorers": [{"name": "printing_scorer:X"}]})
    assert cli.main(["check", "recipe.yaml"]) == 0
    said = capsys.readouterr()
    assert said.err == "hello\n"
    assert yaml.safe_load(said.out)["reward"]["scorers"][0]["name"] == "printing_scorer:X"


# ---- train -----------------------------------------------------------------------------------------------------------


def test_train_names_the_prompts_before_the_run_has_a_folder(recipe, tmp_path, monkeypatch, capsys):
    shown: list[str] = []

    def train(*_, **__):
        shown.append(capsys.readouterr().out)
        raise SinkUnusableError("no room")

    monkeypatch.setattr(runtime, "train", train)
    assert cli.main(["train", recipe]) == 2
    assert shown == ["reading and checking the prompts in prompts.txt\n"]


# ---- refusals and exit codes -----------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *messages: str) -> None:
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("omni-async: ")
    assert all(message in printed.err for message in messages)
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.updtes=5", "trainer.updtes: unknown key; did you mean 'updates'?"),
        ("nonsense", "expected key.path=value"),
        ("model.path=/nowhere", "model.path: there is no folder /nowhere; a checkpoint of a hub gets there by `hf"),
        ("data.prompts=/nowhere.txt", "data.prompts: no such file: /nowhere.txt"),
        ("trainer.sequence_parallel=2", "2 ranks share a sequence, and do not divide trainer.workers = 1"),
        ("algorithm.name=ppo", "algorithm.name: expected one of ['awm', 'dance_grpo', 'diffusion_dpo',"),
    ],
)
@pytest.mark.parametrize("command", ["train", "check"])
def test_wrong_configuration(recipe, capsys, command, override, message):
    assert cli.main([command, recipe, override]) == 2
    refused(capsys, message)


@pytest.mark.parametrize(
    "words", ["RECIPE --trainer.updates=7", "--config RECIPE trainer.updates=7", "--trainer.updates=7 --config=RECIPE"]
)
def test_spellings_of_other_programs(recipe, capsys, words):
    assert cli.main(["check", *(word.replace("RECIPE", recipe) for word in words.split())]) == 0
    assert "updates: 7" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", ["tune --config R --devices 5", "simulate --sweep --config=R", "bench overlap --config R"]
)
def test_every_command_with_a_recipe_takes_it_as_config(words):
    assert str(cli._parse(words.split()).recipe) == "R"


def test_an_unknown_option_names_the_right_spelling(recipe, capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", recipe, "--trainer.updates", "7"])
    assert "unrecognized arguments: --trainer.updates 7; a value of the recipe is key" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    ["", "trian", "docs --nowhere", "train", "check", "simulate", "tune", "bench", "bench fly", "bench overlap"],
)
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(arguments.split())
    said = capsys.readouterr().err
    assert left.value.code == 2 and "usage: omni-async" in said
    assert "key.path=value" not in said.splitlines()[-1]
    assert arguments != "trian" or said.endswith("], got 'trian'; did you mean 'train'?\n")


def test_an_empty_argument_is_no_folder(capsys):
    with pytest.raises(SystemExit):
        cli.main(["report", ""])
    assert "an argument is empty; if it is a variable of the shell, set it" in capsys.readouterr().err


FULL = {"trace.json": "No space left on device"}
UNWRITTEN = "omni-async: not everything could be written: trace.json (No space left on device)\n"


@pytest.mark.parametrize(
    ("outcome", "code", "said"),
    [
        ({"status": "done"}, 0, ""),
        ({"status": "failed", "reason": "EngineError: gone"}, 1, "omni-async: the run failed: EngineError: gone\n"),
        ({"status": "interrupted"}, 130, ""),
        ({"status": "done", "unwritten": FULL}, 1, UNWRITTEN),
        ({"status": "interrupted", "unwritten": FULL}, 1, UNWRITTEN),
        (SinkUnusableError("tracking.mlflow: no"), 2, "omni-async: tracking.mlflow: no\n"),
        (KeyboardInterrupt(), 130, "omni-async: left on Ctrl-C; nothing more is written\n"),
    ],
)
def test_exit_codes(recipe, monkeypatch, capsys, outcome, code, said):
    def train(inputs: Any, timing: Any) -> Any:
        if isinstance(outcome, BaseException):
            raise outcome
        return SimpleNamespace(**{"reason": None, "unwritten": {}} | outcome)

    monkeypatch.setattr(runtime, "train", train)
    assert cli.main(["train", recipe]) == code
    assert capsys.readouterr().err == said


def test_unusable_run_folder(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runtime, "build_cluster", lambda *_: pytest.fail("built a cluster"))
    (tmp_path / "runs").write_text("a file in the way")
    assert cli.main(["train", recipe]) == 2
    assert capsys.readouterr().err.startswith("omni-async: run.dir: cannot make a run folder")


def test_ctrl_c_after_the_end():
    program = (
        "import sys, threading, time\n"
        "from omni_async import cli\n"
        "from omni_async.commands import list_names\n"
        "def listing(options):\n"
        "    threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "    threading._register_atexit(lambda: print('ending', flush=True))\n"  # as Python begins to wait for threads
        "    return 0\n"
        "list_names.list_names = listing\n"
        "sys.argv = ['omni-async', 'list']\n"
        "sys.exit(cli.main())"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, **pipes)
    assert process.stdout.readline() == "ending\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE)[1] == ""
    assert process.returncode == -signal.SIGINT


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["list"], 0),
        (["--help"], 0),
        (["check", "recipe.yaml", "--no-probe"], 0),
        (["simulate", QUICKSTART, "--profile", "qwen_image_lora_h800", "--updates", "8", "--json", "result"], 0),
        (["check", "missing.yaml"], 2),
    ],
    ids=["list", "help", "check", "simulate", "refused"],
)
def test_reader_goes_away(words, code, recipe, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as nobody:
        done = subprocess.run(
            [sys.executable, "-m", "omni_async.cli", *words],
            stdout=nobody,
            stderr=nobody if code else subprocess.PIPE,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""},
            timeout=PATIENCE,
        )
    assert (done.returncode, done.stderr or b"") == (code, b"")
    assert "--json" not in words or b'"results"' in (tmp_path / "result").read_bytes()


# ---- docs ------------------------------------------------------------------------------------------------------------


def test_committed_reference(tmp_path, capsys):
    written = tmp_path / "new folder" / "configuration.md"
    assert cli.main(["docs", "--out", str(written)]) == 0
    assert capsys.readouterr().out == f"wrote {written}\n"
    committed = ROOT / "docs" / "configuration.md"
    assert written.read_text() == committed.read_text(), "the schema changed: run `omni-async docs` and commit the page"
    assert cli.main(["docs", "--out", str(tmp_path)]) == 2
    refused(capsys, f"omni-async: --out: cannot write {tmp_path}: ")


# ---- what it costs to start ------------------------------------------------------------------------------------------


def test_nothing_heavy_is_imported(recipe, tmp_path):
    """Counts modules: 471 take a quarter of a second to import."""
    (tmp_path / "tuned.yaml").write_text(tune_world.RECIPE)
    write_profile(tmp_path / "steady.json", tune_world.PROFILE)
    tune = ["tune", str(tmp_path / "tuned.yaml"), "--profile", str(tmp_path / "steady.json"), "--devices", "3"]
    program = (
        "import sys\n"
        "from omni_async import cli\n"
        "heavy = ('torch', 'ray', 'mlflow', 'diffusers', 'transformers', 'tensordict', 'matplotlib')\n"
        "loaded = lambda: [name for name in heavy if name in sys.modules]\n"
        "print(loaded())\n"
        "cli.main(['list'])\n"
        "print('modules:', len(sys.modules))\n"
        f"cli.main(['check', {recipe!r}])\n"
        f"assert cli.main({[*tune, '--budget', '12']!r}) == 0\n"
        "import omni_async.records.read.record\n"
        "print(loaded())"
    )
    command = [sys.executable, "-c", program]
    found = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True, **found)
    lines = done.stdout.splitlines()
    assert lines[0] == lines[-1] == "[]"
    [modules] = [int(line.split()[1]) for line in lines if line.startswith("modules:")]
    assert modules < 700


def test_a_shell_completes_commands(tmp_path):
    pytest.importorskip("argcomplete")
    asked = {"_ARGCOMPLETE": "1", "COMP_LINE": "omni-async tr", "COMP_POINT": "13", "_ARGCOMPLETE_IFS": "\n"}
    where = {"_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "found"), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "omni_async.cli"], env=os.environ | asked | where, check=True)
    assert (tmp_path / "found").read_text().split() == ["train"]
