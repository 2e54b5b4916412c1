"""Tests `omni-async init`: valid recipes, or one line and no file."""

from __future__ import annotations

import builtins
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from rich.console import Console

from omni_async import cli
from omni_async.algorithms.registry import objective_names
from omni_async.commands.scaffold import init as scaffold
from omni_async.commands.scaffold.asking import Questions
from omni_async.commands.scaffold.proposals import objectives_for, propose_size, read_objective
from omni_async.commands.scaffold.recipe import Reward, share_out
from omni_async.config import ConfigError, load
from omni_async.config.describe import description, walk
from omni_async.config.schema import Config
from omni_async.plugins.families import find_family
from omni_async.runtime.preflight.check import preflight
from tests.config.test_writing import largest_file
from tests.pipelines.families import FAMILIES, Family
from tests.support.places import ROOT

QUICKSTART = ROOT / "recipes" / "quickstart"
DIGITS = ["--model", f"{QUICKSTART}/checkpoint", "--prompts", f"{QUICKSTART}/prompts_train.jsonl"]
DIVIDED = ("qwen_image", "wan2_2")  # images and video on fewer devices
SMALL = ["rollout.sampling.height=64", "rollout.sampling.width=64"]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], str]:
    """A tiny checkpoint of a family, built once."""
    folder, made = tmp_path_factory.mktemp("checkpoints"), {}

    def build(family: Family) -> str:
        if family.label not in made:
            made[family.label] = family.build(folder / family.label)
        return made[family.label]

    return build


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.txt").write_text("a red circle\na blue square\n")
    (tmp_path / "signs.jsonl").write_text("".join(json.dumps({"prompt": "a sign", "target": t}) + "\n" for t in "ab"))
    counts = {"prompt": "two dogs", "include": [{"class": "dog", "count": 2}]}
    (tmp_path / "counts.jsonl").write_text(json.dumps(counts) + "\n")
    return tmp_path


def written(*arguments: str) -> Config:
    """Returns the recipe that the command writes, as `check` accepts it."""
    assert cli.main(["init", "new/my.yaml", "--yes", *arguments]) == 0
    config = load("new/my.yaml")
    preflight(config, elsewhere=True)
    return config


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["init", "my.yaml", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("omni-async: ") and printed.err.count("\n") == 1
    assert not Path("my.yaml").exists()
    return printed.err.removeprefix("omni-async: ").rstrip()


@pytest.mark.sliced(floor=4)
@pytest.mark.parametrize(
    ("family", "devices"),
    [*((one, 8) for one in FAMILIES), *((one, n) for one in FAMILIES if one.name in DIVIDED for n in (0, 1, 2))],
    ids=lambda value: getattr(value, "label", value),
)
def test_a_recipe_for_every_family_passes_check(family, devices, built, workplace):
    prompts = "lines.txt"
    if find_family(family.name).needs_images:
        prompts = str(ROOT / "recipes" / "tiny" / "prompts_i2v.jsonl")
    video = any(shape.part == "video" for shape in family.specs[0].media())
    sampling = msgspec.to_builtins(family.specs[0])
    config = written(
        *("--model", built(family), "--prompts", prompts, "--devices", str(devices)),
        *("--reward", "motion_smoothness" if video else "jpeg_size", f"rollout.sampling={json.dumps(sampling)}"),
    )
    assert config.model.pipeline == family.name
    assert config.rollout.sampling == family.specs[0]
    assert config.staleness.max_updates == (0 if devices == 1 else 2)
    assert config.buffer.groups == (config.staleness.max_updates + 1) * config.trainer.groups_per_update
    asked = (config.rollout.workers, config.trainer.workers)
    gpus = [asked[0] * config.placement.rollout.gpus, asked[1] * config.placement.trainer.gpus]
    assert (max(gpus) if config.placement.colocated else sum(gpus)) == devices


@pytest.mark.sliced(floor=4)
@pytest.mark.parametrize("algorithm", [name for name in objective_names() if not name.startswith("token_")])
def test_a_recipe_of_every_algorithm_passes_check(algorithm, workplace):
    (workplace / "teacher").symlink_to(QUICKSTART / "checkpoint")
    teacher = ["algorithm.teacher.path=teacher"] if algorithm == "distill" else []
    config = written(*DIGITS, "--algorithm", algorithm, "--devices", "0", *teacher)
    assert config.algorithm.name == algorithm and config.rollout.sampling.height == 64  # as in quickstart.yaml
    assert config.validation is not None and config.validation.prompts == f"{QUICKSTART}/prompts_validation.jsonl"


def test_a_relative_path_of_an_override_is_rewritten(workplace):
    config = written(*DIGITS, "--devices", "0", "reward.cache.path=new/there.sqlite")
    assert yaml.safe_load(Path("new/my.yaml").read_text())["reward"]["cache"]["path"] == "there.sqlite"
    assert config.reward.cache.path == str(workplace / "new" / "there.sqlite")


@pytest.mark.parametrize(
    ("config", "side", "warned"),
    [
        ({"sample_size": 8}, 64, False),
        ({"sample_size": 128}, 512, False),
        ({}, 512, True),
        ({"sample_size": 1}, 512, True),
    ],
)
def test_the_size_is_of_the_checkpoint_or_a_warning_says_that_it_is_unknown(config, side, warned, workplace):
    for part, content in (("transformer", config), ("vae", {"block_out_channels": [1] * 4})):
        (workplace / "model" / part).mkdir(parents=True)
        (workplace / "model" / part / "config.json").write_text(json.dumps(content))
    size = propose_size("model", find_family("stable_diffusion_3"), 10**6)
    assert (size.sampling["height"], size.sampling["width"]) == (side, side)
    assert ("512x512 is the family's default" in size.warning) is warned
    assert not propose_size("model", find_family("stable_diffusion_3"), 10**9).warning


def test_an_unknown_size_is_a_warning_with_the_keys(workplace, capsys):
    shutil.copytree(QUICKSTART / "checkpoint", "alone")
    arguments = ["--yes", "--model", "alone", "--prompts", "signs.jsonl", "--devices", "0", "--reward", "jpeg_size"]
    assert cli.main(["init", "large.yaml", *arguments]) == 0
    assert "rollout.sampling.height=N" in capsys.readouterr().err
    assert cli.main(["init", "small.yaml", *arguments, *SMALL]) == 0 and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("devices", "engine", "workers", "colocated"),
    [
        pytest.param(0, "transformers", 1, False, marks=pytest.mark.thorough),
        pytest.param(1, "transformers", 1, True, marks=pytest.mark.thorough),
        (8, "vllm", 4, False),
    ],
)
def test_a_recipe_for_a_model_that_draws_tokens(devices, engine, workers, colocated, workplace, monkeypatch, capsys):
    monkeypatch.setattr("omni_async.commands.scaffold.proposals.find_spec", lambda name: name)
    digits = QUICKSTART / "read_digits"
    asked = ["--prompts", f"{digits}/prompts_train.jsonl", "--devices", str(devices)]
    config = written("--model", f"{digits}/checkpoint", *asked)
    assert (config.model.pipeline, config.algorithm.name) == ("qwen_omni", "token_grpo")
    assert config.rollout.sampling.max_tokens == 4, "as in read_digits.yaml"
    assert (config.rollout.engine, config.rollout.workers, config.trainer.workers) == (engine, workers, workers)
    assert (config.rollout.sde, config.placement.colocated, config.trainer.optimizer.lr) == (None, colocated, 3e-4)
    assert [scorer.name for scorer in config.reward.scorers] == ["exact_match"]
    assert config.validation is not None and config.validation.prompts == f"{digits}/prompts_validation.jsonl"
    assert "token_grpo on qwen_omni" in capsys.readouterr().out


def test_a_large_thinker_gets_adapters_and_one_question_about_many_images_is_split(workplace, monkeypatch):
    monkeypatch.setattr("omni_async.commands.scaffold.recipe._LARGE", 10**6)
    images = [f"{QUICKSTART}/read_digits/images/train_{i:02}_0.png" for i in range(20)]
    shutil.copytree(QUICKSTART / "read_digits" / "checkpoint", "alone")
    for i, image in enumerate(images):
        shutil.copy(image, f"{i}.png")
    rows = ({"prompt": "Which?", "image": f"{i}.png"} for i in range(20))
    Path("own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("own_reward.py").write_text("def f(texts, prompts):\n    return [0.0] * len(texts)\nf.accepts = ('text',)\n")
    own = ["--reward", "own_reward.py:f", "rollout.sampling.max_tokens=16"]
    told = written("--model", "alone", "--prompts", "own.jsonl", "--devices", "0", *own)
    assert told.model.lora is not None and told.model.lora.target_modules == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert told.validation is not None and told.validation.split == 0.1
    assert (told.rollout.sampling.max_tokens, told.weights.payload) == (16, "lora")


def test_a_commented_recipe_and_the_next_commands_are_shown(workplace, capsys):
    assert cli.main(["init", "my recipe.yaml", "--yes", *DIGITS, *SMALL, "--devices", "0"]) == 0
    assert capsys.readouterr().out == (
        "wrote my recipe.yaml: flow_grpo on qwen_image, 60 prompts, reward ocr\n"
        "next:\n  omni-async check 'my recipe.yaml'\n  omni-async train 'my recipe.yaml'\n"
    )
    text = Path("my recipe.yaml").read_text()
    comments = " ".join(line.strip().removeprefix("#").strip() for line in text.splitlines() if "# " in line)
    keys = [*walk(Config), *walk(find_family("qwen_image").sampling, "rollout.sampling.")]
    texts = {path: description(annotation) for path, annotation, _ in keys}
    tree = yaml.safe_load(text)
    there = [path for path in texts if holds(tree, *path.split("."))]
    assert tree["run"]["name"] == "my-recipe" and len(there) > 40
    assert all(texts[path] in comments for path in there)
    assert "Here: a cap: samples are as old" in comments


def holds(tree: Any, *path: str) -> bool:
    return not path or (isinstance(tree, dict) and path[0] in tree and holds(tree[path[0]], *path[1:]))


def test_paths_are_relative_to_the_recipe(workplace, monkeypatch):
    (workplace / "model").symlink_to(QUICKSTART / "checkpoint")
    arguments = ["--model", "model", "--prompts", "signs.jsonl", "--devices", "0", "--reward", "jpeg_size"]
    config = written(*arguments, "run.seed=7", "staleness.max_updates=1")
    tree = yaml.safe_load(Path("new/my.yaml").read_text())
    assert tree["model"]["path"] == "../model" and tree["data"]["prompts"] == "../signs.jsonl"
    assert (config.run.seed, config.staleness.max_updates, config.validation) == (7, 1, None)
    monkeypatch.chdir("/")
    assert load(workplace / "new" / "my.yaml") == config


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
def test_the_proposed_reward_fits_prompts_and_medium(family, prompts, reward, workplace):
    found = find_family(family)
    proposed, _ = scaffold.propose_reward(scaffold.read_prompts(prompts, found), found.sampling())
    assert proposed == reward


@pytest.mark.parametrize("more", [[], ["--reward", "ocr"], ["--reward", "scene_text"], ["--reward", "jpeg_size"]])
def test_a_named_reward_is_taken_and_small_images_get_ocr(more, workplace):
    config = written(*DIGITS, "--devices", "0", *(more or SMALL))
    assert config.reward.scorers[0].name == (more[1] if more else "ocr")


def test_a_scoring_model_gets_a_device(workplace):
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


def asked(monkeypatch: pytest.MonkeyPatch, *answers: str) -> tuple[int, str]:
    """Returns the exit code of the command at a terminal where these answers are typed, and what it showed."""
    questions, shown, typed = Questions(ask=False), io.StringIO(), iter(answers)
    questions._console = Console(file=shown, width=200)

    def read(prompt: str = "") -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", read)
    monkeypatch.setattr(scaffold, "Questions", lambda ask: questions)
    return cli.main(["init", "my.yaml", "rollout.sampling.height=64"]), shown.getvalue()


def test_a_wrong_answer_is_asked_again_and_enter_takes_the_proposal(workplace, monkeypatch):
    answers = ["nowhere", f"{QUICKSTART}/checkpoint", "none.txt", "signs.jsonl", "", "", "flow_gro", "gspo", "0"]
    code, shown = asked(monkeypatch, *answers)
    assert code == 0
    config = load("my.yaml")
    assert (config.algorithm.name, config.reward.scorers[0].name, config.validation) == ("gspo", "ocr", None)
    assert "there is no folder nowhere" in shown and "no such file: none.txt" in shown
    assert "did you mean 'flow_grpo'" in shown
    assert "qwen_image" in shown and "ocr fits: every prompt says what ocr looks for" in shown


def test_only_objectives_on_what_the_model_draws_are_offered(workplace, monkeypatch):
    answers = [f"{QUICKSTART}/checkpoint", "signs.jsonl", "", "", "token_grpo", "awm", "0"]
    code, shown = asked(monkeypatch, *answers)
    assert (code, load("my.yaml").algorithm.name) == (0, "awm")
    shown = " ".join(shown.split())
    latents = [name for name in objective_names() if not name.startswith("token_")]
    assert f"algorithms: {', '.join(latents)} (docs/choose.md)" in shown
    why = "token_grpo trains the tokens of answers, and qwen_image draws latents; expected one of ['awm', "
    assert why in shown


def test_a_model_that_draws_tokens_gets_objectives_on_tokens():
    family = find_family("qwen_omni")
    assert objectives_for(family) == ["token_cispo", "token_grpo", "token_gspo"]
    assert read_objective("token_gspo", family).name == "token_gspo"
    with pytest.raises(ConfigError, match=r"flow_grpo trains denoising steps .* qwen_omni draws tokens; expected one"):
        read_objective("flow_grpo", family)
    with pytest.raises(ConfigError, match=r"expected one of .*did you mean 'token_grpo'") as refusal:
        read_objective("token_grp", family)
    assert "flow_grpo" not in str(refusal.value)


@pytest.mark.parametrize(("ask", "stdin", "stdout"), [(True, True, True), (True, True, False), (False, True, True)])
def test_questions_need_a_terminal_and_consent(ask, stdin, stdout, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: stdin)
    monkeypatch.setattr("sys.stdout.isatty", lambda: stdout)
    assert (Questions(ask)._console is not None) is (ask and stdin and stdout)


def test_input_that_ends_is_one_line(workplace, monkeypatch, capsys):
    code, _ = asked(monkeypatch, f"{QUICKSTART}/checkpoint")
    assert code == 2 and "--prompts: the input ended before an answer" in capsys.readouterr().err
    assert not Path("my.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--model: required without a terminal: Checkpoint folder, as diffusers or transformers loads it"),
        (DIGITS[:2], "--prompts: required without a terminal: Prompts to train on (a folder, .txt, .jsonl, "),
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
def test_wrong_input_is_one_line_and_leaves_no_file(arguments, said, workplace, capsys):
    told = refused(capsys, *arguments)
    assert told.startswith(said) or (said == "my.yaml: " and "accepts audio" in told)


def test_a_full_disk_leaves_no_part_and_a_recipe_there_stays(workplace, capsys):
    with largest_file(20):
        assert "my.yaml: cannot be written: File too large" in refused(capsys, "--yes", "--devices", "0", *DIGITS)
    assert cli.main(["init", "lines.txt/my.yaml", "--yes", "--devices", "0", *DIGITS]) == 2
    assert "lines.txt/my.yaml: cannot be written: " in capsys.readouterr().err
    Path("my.yaml").write_text("mine")
    assert cli.main(["init", "my.yaml", "--yes", *DIGITS]) == 2
    assert capsys.readouterr().err == "omni-async: my.yaml: is there already; name another file, or remove it\n"
    assert Path("my.yaml").read_text() == "mine"


def test_a_family_that_needs_images_refuses_prompts_without(built, workplace, capsys):
    [family] = (one for one in FAMILIES if one.label == "wan2_2_i2v")
    model = built(family)
    capsys.readouterr()  # progress of the build
    told = refused(capsys, "--model", model, "--prompts", "lines.txt")
    assert told == "--prompts: lines.txt: 2 of 2 prompts have no `image`, which wan2_2_i2v begins with"


def test_devices_are_shared_out_by_the_work_of_either_half():
    """An update's samples take ten passes to generate, and two rows of four passes each to train."""
    for devices in range(2, 65):
        split = share_out(devices, Reward("pick_score", {}, "model"))
        assert split.rollout + split.trainer + split.reward == devices and split.reward == (devices > 2)
        assert min(split.rollout, split.trainer) >= 1 and abs(8 * split.rollout - 10 * split.trainer) <= 10


@pytest.mark.parametrize(
    ("name", "folders"),
    [
        ("quickstart", {"quickstart"}),
        ("emulated", {"emulated", "qwen_image_ocr", "wan22_dance"}),
        ("quickstart/read_digits", {"quickstart"}),
    ],
)
def test_shipped_recipes_are_copied(tmp_path, monkeypatch, capsys, name, folders):
    """With the folders that they extend, so that they load."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "--from", name]) == 0
    assert f"omni-async train recipes/{name}/" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "recipes").iterdir()} >= folders
    for recipe in (tmp_path / "recipes" / name).glob("*.yaml"):
        load(recipe)
    assert cli.main(["init", "--from", name]) == 2
    assert f"recipes/{name}: is there already" in capsys.readouterr().err


def test_a_recipe_within_a_folder_is_copied_alone_or_with_the_folder_that_it_extends(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "--from", "read_digits"]) == 0
    assert [path.name for path in (tmp_path / "recipes" / "quickstart").iterdir()] == ["read_digits"]
    mine = tmp_path / "recipes" / "quickstart" / "read_digits" / "README.md"
    mine.write_text("mine")
    assert cli.main(["init", "--from", "algorithms"]) == 0 and mine.read_text() == "mine"
    load(tmp_path / "recipes" / "quickstart" / "algorithms" / "gspo.yaml")


def test_folders_that_are_there_in_part_are_completed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes" / "quickstart" / "video").mkdir(parents=True)
    assert cli.main(["init", "--from", "emulated"]) == 0
    load(tmp_path / "recipes" / "emulated" / "qwen3_omni_thinker.yaml")
    shutil.rmtree(tmp_path / "recipes" / "emulated")
    assert cli.main(["init", "--from", "emulated"]) == 0
    assert "wrote recipes/emulated: 7 files\nnext:\n" in capsys.readouterr().out, "the copied folders are not listed"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", "quickstrat"], "did you mean 'quickstart'?"),
        (["mine.yaml", "--from", "quickstart"], "leave out RECIPE"),
    ],
)
def test_wrong_copies(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", *arguments]) == 2
    assert said in capsys.readouterr().err and not [*tmp_path.iterdir()]
