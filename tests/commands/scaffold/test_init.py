"""Tests `omni-async init`: what it writes passes check for every family, and what it cannot write is one line."""

from __future__ import annotations

import builtins
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import yaml
from rich.console import Console

from omni_async import cli
from omni_async.algorithms.registry import objective_names
from omni_async.commands.scaffold import init as scaffold
from omni_async.commands.scaffold.asking import Defaults, TerminalPrompts, build_asking
from omni_async.commands.scaffold.recipe import Reward, share_out
from omni_async.config import load
from omni_async.config.describe import description, walk
from omni_async.config.schema import Config
from omni_async.plugins.families import find_family
from omni_async.runtime.preflight.check import preflight
from tests.config.test_writing import largest_file
from tests.pipelines.families import FAMILIES
from tests.support.places import ROOT

QUICKSTART = ROOT / "recipes" / "quickstart"
DIGITS = ["--model", f"{QUICKSTART}/checkpoint", "--prompts", f"{QUICKSTART}/prompts_train.jsonl"]
SMALL = ["rollout.sampling.height=64", "rollout.sampling.width=64"]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tiny checkpoint of every kind that there is."""
    return {one.label: one.build(tmp_path_factory.mktemp("checkpoint") / one.label) for one in FAMILIES}


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.txt").write_text("a red circle\na blue square\n")
    (tmp_path / "signs.jsonl").write_text("".join(json.dumps({"prompt": "a sign", "target": t}) + "\n" for t in "ab"))
    counts = {"prompt": "two dogs", "include": [{"class": "dog", "count": 2}]}
    (tmp_path / "counts.jsonl").write_text(json.dumps(counts) + "\n")
    return tmp_path


def size_of(family: Any) -> list[str]:
    """Returns what says that samples are as small as the checkpoint makes them."""
    return [
        f"rollout.sampling.{key}={json.dumps(value)}" for key, value in msgspec.to_builtins(family.specs[0]).items()
    ]


def written(*arguments: str) -> Config:
    """Returns the recipe that the command writes, as `check` accepts it."""
    assert cli.main(["init", "new/my.yaml", "--yes", *arguments]) == 0
    config = load("new/my.yaml")
    preflight(config, elsewhere=True)
    return config


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Returns the one line that the command says, having written nothing."""
    assert cli.main(["init", "my.yaml", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("omni-async: ") and printed.err.count("\n") == 1
    assert not Path("my.yaml").exists()
    return printed.err.removeprefix("omni-async: ").rstrip()


# ---- what is written -------------------------------------------------------------------------------------------------


@pytest.mark.sliced(floor=12)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.label)
@pytest.mark.parametrize("devices", [0, 1, 2, 8])
def test_a_recipe_for_every_family_passes_check(family, devices, checkpoints, workplace):
    prompts = "lines.txt"
    if find_family(family.name).needs_images:
        prompts = str(ROOT / "recipes" / "tiny" / "prompts_i2v.jsonl")
    video = any(shape.part == "video" for shape in family.specs[0].media())
    config = written(
        *("--model", checkpoints[family.label], "--prompts", prompts, "--devices", str(devices)),
        *("--reward", "motion_smoothness" if video else "jpeg_size", *size_of(family)),
    )
    assert config.model.pipeline == family.name
    assert config.rollout.sampling == family.specs[0]
    assert config.staleness.max_updates == (0 if devices == 1 else 2)
    assert config.buffer.groups == (config.staleness.max_updates + 1) * config.trainer.groups_per_update
    asked = (config.rollout.workers, config.trainer.workers)
    gpus = [asked[0] * config.placement.rollout.gpus, asked[1] * config.placement.trainer.gpus]
    assert (max(gpus) if config.placement.colocated else sum(gpus)) == devices


@pytest.mark.parametrize("algorithm", [*objective_names()])
def test_a_recipe_of_every_algorithm_passes_check(algorithm, workplace):
    config = written(*DIGITS, "--algorithm", algorithm, "--devices", "0", *SMALL)
    assert config.algorithm.name == algorithm
    assert config.validation is not None and config.validation.prompts == f"{QUICKSTART}/prompts_validation.jsonl"


def test_a_commented_recipe_has_the_schemas_own_words_above_every_key(workplace):
    config = written(*DIGITS, "--devices", "0", *SMALL)
    text = Path("new/my.yaml").read_text()
    comments = " ".join(line.strip().removeprefix("#").strip() for line in text.splitlines() if "# " in line)
    tree = yaml.safe_load(text)
    sampling = find_family("qwen_image").sampling
    told = 0
    for path, annotation, _ in [*walk(Config), *walk(sampling, "rollout.sampling.")]:
        here: Any = tree
        for key in path.split("."):
            here = here.get(key, "absent") if isinstance(here, dict) else "absent"
        if here != "absent":
            assert description(annotation) in comments, path
            told += 1
    assert told > 40
    assert "Here: enough for all roles to be busy" in comments
    assert config.rollout.sampling.height == 64


def test_the_command_says_what_it_wrote_and_what_to_do_next(workplace, capsys):
    assert cli.main(["init", "my recipe.yaml", "--yes", *DIGITS, *SMALL, "--devices", "0"]) == 0
    assert capsys.readouterr().out == (
        "wrote my recipe.yaml: flow_grpo on qwen_image, 60 prompts, reward ocr\n"
        "next:\n  omni-async check 'my recipe.yaml'\n  omni-async train 'my recipe.yaml'\n"
    )
    assert load("my recipe.yaml").run.name == "my-recipe"


def test_paths_are_relative_to_the_recipe_and_values_are_the_command_lines(workplace, monkeypatch):
    (workplace / "model").symlink_to(QUICKSTART / "checkpoint")
    arguments = ["--model", "model", "--prompts", "signs.jsonl", "--devices", "0", "--reward", "jpeg_size"]
    config = written(*arguments, "run.seed=7", "staleness.max_updates=1")
    tree = yaml.safe_load(Path("new/my.yaml").read_text())
    assert tree["model"]["path"] == "../model" and tree["data"]["prompts"] == "../signs.jsonl"
    assert (config.run.seed, config.staleness.max_updates, config.validation) == (7, 1, None)
    monkeypatch.chdir("/")
    assert load(workplace / "new" / "my.yaml") == config


# ---- rewards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "prompts", "reward"),
    [
        ("qwen_image", "signs.jsonl", "scene_text"),
        ("wan2_2", "signs.jsonl", "scene_text"),
        ("qwen_image", "counts.jsonl", "object_checks"),
        ("wan2_2", "counts.jsonl", "motion_smoothness"),
        ("qwen_image", "lines.txt", "pick_score"),
        ("ltx_2", "lines.txt", "motion_smoothness"),
    ],
)
def test_the_reward_that_is_proposed_fits_the_prompts_and_the_medium(family, prompts, reward, workplace):
    found = find_family(family)
    proposed, _ = scaffold.propose_reward(scaffold.read_prompts(prompts, found), found.sampling())
    assert proposed == reward


def test_a_small_picture_of_a_line_of_text_is_read_as_one(workplace):
    assert written(*DIGITS, "--devices", "0", *SMALL).reward.scorers[0].name == "ocr"


@pytest.mark.parametrize("name", ["ocr", "scene_text", "jpeg_size"])
def test_a_reward_that_is_named_is_taken(name, workplace):
    assert written(*DIGITS, "--devices", "0", "--reward", name).reward.scorers[0].name == name


def test_a_model_that_scores_has_a_device_where_there_are_enough(workplace):
    from tests.support import tiny_clip

    tiny_clip.build(workplace / "clip")
    config = written(*DIGITS, "--devices", "8", "--reward", "clip_score", "--param", "path=clip")
    assert config.reward.scorers[0].params == {"path": str(workplace / "clip")}
    assert (config.placement.reward.gpus, config.rollout.workers, config.trainer.workers) == (1, 4, 3)
    assert config.rollout.group_size % config.trainer.workers == 0


def test_a_judge_is_served_by_the_run(workplace):
    (workplace / "judge").mkdir()
    judge = ["--reward", "vlm_judge", "--param", "model=judge", "--param", "mode=rating"]
    config = written(*DIGITS, "--devices", "4", *judge)
    [server] = config.reward.servers
    assert (server.model, server.resources.gpus) == (str(workplace / "judge"), 1)
    assert config.reward.scorers[0].params == {"model": "judge", "server": "judge", "mode": "rating"}
    with pytest.raises(ValueError, match="--devices: a judge"):
        share_out(2, Reward("vlm_judge", {}, "elsewhere", judge="judge"))


# ---- asking ----------------------------------------------------------------------------------------------------------


def asked(monkeypatch: pytest.MonkeyPatch, *answers: str) -> tuple[int, str]:
    """Returns the exit code of the command at a terminal where these answers are typed, and what it showed."""
    shown = io.StringIO()
    person, typed = TerminalPrompts(Console(file=shown, width=200)), iter(answers)

    def read(prompt: str = "") -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", read)
    monkeypatch.setattr(scaffold, "build_asking", lambda ask: person)
    return cli.main(["init", "my.yaml", "rollout.sampling.height=64"]), shown.getvalue()


def test_a_person_is_asked_again_after_a_wrong_answer_and_enter_takes_the_proposal(workplace, monkeypatch):
    answers = ["nowhere", f"{QUICKSTART}/checkpoint", "none.txt", "signs.jsonl", "", "", "flow_gro", "gspo", "0"]
    code, shown = asked(monkeypatch, *answers)
    assert code == 0
    config = load("my.yaml")
    assert (config.algorithm.name, config.reward.scorers[0].name, config.validation) == ("gspo", "ocr", None)
    assert "there is no folder nowhere" in shown and "no such file: none.txt" in shown
    assert "did you mean 'flow_grpo'" in shown
    assert "qwen_image" in shown and "ocr fits: every prompt says what ocr looks for" in shown


@pytest.mark.parametrize(
    ("ask", "terminals", "who"), [(True, 2, TerminalPrompts), (True, 1, Defaults), (False, 2, Defaults)]
)
def test_only_a_person_at_a_terminal_who_wants_to_be_asked_is(ask, terminals, who, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: terminals > 0))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: terminals > 1))
    assert isinstance(build_asking(ask), who)


def test_input_that_ends_is_one_line(workplace, monkeypatch, capsys):
    code, _ = asked(monkeypatch, f"{QUICKSTART}/checkpoint")
    assert code == 2 and "--prompts: the input ended before an answer" in capsys.readouterr().err
    assert not Path("my.yaml").exists()


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--model: required without a terminal: Checkpoint folder in diffusers layout"),
        (DIGITS[:2], "--prompts: required without a terminal: Prompts to train on (.txt or .jsonl)"),
        (["--model", "nowhere"], "--model: there is no folder nowhere; "),
        ([*DIGITS[:2], "--prompts", "none.txt"], "--prompts: no such file: none.txt"),
        (
            [*DIGITS[:2], "--prompts", "lines.txt"],
            "--param path=VALUE: required without a terminal: pick_score needs",
        ),
        ([*DIGITS, "--reward", "ocrr"], "--reward: scorer 'ocrr': "),
        ([*DIGITS, "--algorithm", "ppo"], "--algorithm: expected one of ['awm', "),
        ([*DIGITS, "--devices", "many"], "--devices: expected a number from 0 to 10000, got 'many'"),
        ([*DIGITS, "--devices", "2", "--reward", "vlm_judge", "--param", "model=x"], "--devices: a judge that the run"),
        ([*DIGITS, "--param", "x"], "--param: expected KEY=VALUE, got 'x'"),
        ([*DIGITS, "--devices", "0", "--reward", "clap", "--param", "path=x"], "my.yaml: "),
        ([*DIGITS, "--devices", "0", "trainer.updtes=1"], "my.yaml: trainer.updtes: unknown key; did you mean"),
        ([*DIGITS, "--devices", "0", "--validation", "no.txt"], "--validation: no such file: no.txt"),
        *(
            ([*DIGITS, "--devices", "0", override], f"my.yaml: {override.partition('=')[0]}")
            for override in (
                *("rollout=3", "rollout.sampling=7", "rollout.sampling.height=high"),
                *("reward=3", "reward.servers=3", "reward.scorers=3", "reward.scorers=[3]"),
            )
        ),
    ],
)
def test_what_cannot_be_written_is_one_line_and_leaves_no_file(arguments, said, workplace, capsys):
    told = refused(capsys, *arguments)
    assert told.startswith(said) or (said == "my.yaml: " and "accepts audio" in told)


def test_a_recipe_that_does_not_fit_leaves_no_part(workplace, capsys):
    with largest_file(20):
        assert cli.main(["init", "my.yaml", "--yes", "--devices", "0", *DIGITS]) == 2
    assert "my.yaml: cannot be written: File too large" in capsys.readouterr().err and not Path("my.yaml").exists()


def test_a_recipe_that_is_there_stays(workplace, capsys):
    Path("my.yaml").write_text("mine")
    assert cli.main(["init", "my.yaml", "--yes", *DIGITS]) == 2
    assert capsys.readouterr().err == "omni-async: my.yaml: is there already; name another file, or remove it\n"
    assert Path("my.yaml").read_text() == "mine"


def test_prompts_without_the_image_that_a_family_begins_with_are_refused(checkpoints, workplace, capsys):
    told = refused(capsys, "--model", checkpoints["wan2_2_i2v"], "--prompts", "lines.txt")
    assert told == "--prompts: lines.txt: 2 of 2 prompts have no `image`, which wan2_2_i2v begins with"


def test_devices_are_shared_out_by_the_work_of_either_half():
    """An update's samples take ten passes to generate, and two rows of four passes each to train."""
    for devices in range(2, 65):
        split = share_out(devices, Reward("pick_score", {}, "model"))
        assert split.rollout + split.trainer + split.reward == devices and split.reward == (devices > 2)
        assert min(split.rollout, split.trainer) >= 1 and abs(8 * split.rollout - 10 * split.trainer) <= 10
