"""Runs every published recipe at the size of a test: emulated, in one process, and as its own header says."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from PIL import Image

from omni_async.config import load
from omni_async.config.draws import TOKEN_ENGINES
from omni_async.plugins.families import family_names, find_family
from tests.support.job_world import ENVIRONMENT, emulate, left_behind, run, write_emulated
from tests.support.places import ROOT

RECIPES = ROOT / "recipes"
# They generate their samples, of latents: the profile has no times of tokens.
ONLINE = [
    path
    for path in sorted(RECIPES.rglob("*.yaml"))
    if "offline" not in path.name and load(path).rollout.engine not in TOKEN_ENGINES
]
PUBLISHED = [
    path
    for path in sorted(RECIPES.glob("*/*.yaml"))
    if path.parent.name not in ("emulated", "quickstart", "tiny") and load(path).model.pipeline in family_names()
]

# So few groups that those of some recipes' micro-batches do not divide them.
_ALONE = "trainer.groups_per_micro_batch=1"


@pytest.mark.sliced(floor=10)
@pytest.mark.parametrize("path", ONLINE, ids=lambda path: "/".join(path.parts[-2:]))
def test_every_recipe_can_be_emulated(path: Path, tmp_path: Path) -> None:
    write_emulated(tmp_path)
    few = ("trainer.updates=2", "trainer.groups_per_update=2", "trainer.steps_per_update=1", _ALONE)
    profile = ("emulation.payload_scale=0.001", f"emulation.profile={tmp_path / 'profile.json'}")
    made = emulate(path, *few, *profile, folder=tmp_path / "run")
    assert made.ended["conservation"]["trained"] == 4


# Fewer, smaller samples and no accelerators, everything else as the recipe says.
_SMALL = (
    *("run.runtime=inprocess", "rollout.group_size=4", "trainer.updates=1"),
    *(f"{role}.workers=1" for role in ("rollout", "reward", "trainer")),
    *(f"placement.{role}.gpus=0" for role in ("rollout", "reward", "trainer")),
    _ALONE,
    "tracking.mlflow.enabled=false",
)
_OF_LATENTS = (
    *("rollout.engine=diffusers", "validation.num_inference_steps=4"),
    "trainer.groups_per_update=4",  # a multiple of every recipe's steps_per_update
)
_OF_TOKENS = (
    "rollout.engine=transformers",
    "rollout.engine_args={}",
    "rollout.sampling.max_tokens=12",
    "trainer.groups_per_update=8",
    "data.columns={}",
)
_SIDE = {"ltx_2": 64}  # of an image or video; else 32
_FURTHER = {"qwen_image_edit": ("rollout.sampling.image_area=4096",)}  # sizes
# Nothing can be read in noise, and groups of equal rewards are not trained.
_REWARD = {
    **{"image": "{name: jpeg_size}", "video": "{name: motion_smoothness}"},
    "text": "{name: pattern, params: {pattern: '(?s)[ -~].*'}}",
}


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def build(family: str) -> Path:
        options = {"ti2v": True} if family == "wan2_2" else {}  # what the published recipe trains
        folder = tmp_path_factory.mktemp(family) / "tiny"
        path: Path = import_module(f"omni_async_pipelines.{family}.tiny").build(folder, **options)
        return path

    return build


@pytest.mark.slow
@pytest.mark.sliced(floor=1)
@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_published_recipes_train(path: Path, checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    prompts, asked = tmp_path / "prompts.jsonl", load(path)
    texts = ('a sign that says "open"', 'a shop called "7 cats"')
    images = {"image": "image.png"} if find_family(asked.model.pipeline or "").prompt_images else {}
    Image.linear_gradient("L").resize((64, 48)).convert("RGB").save(tmp_path / "image.png")
    prompts.write_text("".join(json.dumps({"prompt": text, **images}) + "\n" for text in texts))
    side, part = _SIDE.get(asked.model.pipeline or "", 32), asked.rollout.sampling.media()[0].part
    sizes = [f"rollout.sampling.{key}={side}" for key in ("height", "width")]
    made = run(
        path,
        *_SMALL,
        *(_OF_TOKENS if part == "text" else (*_OF_LATENTS, *sizes)),
        *_FURTHER.get(asked.model.pipeline or "", ()),
        f"run.dir={tmp_path / 'runs'}",
        f"model.path={checkpoint_of(asked.model.pipeline)}",
        *(f"{section}.prompts={prompts}" for section in ("data", "validation")),
        f"reward.scorers=[{_REWARD[part]}]",
        "reward.servers=[]",
    ).check_every_group_ended_once()
    [update] = made.metrics
    assert made.summary.status == "done" and update["grad_norm"] > 0
    assert [point.version for point in made.summary.validation] == [0, 1]
    assert all("lora" in name for name in made.weights()) == (asked.model.lora is not None)


@pytest.mark.sliced(floor=1)
@pytest.mark.parametrize("name", ["video", "control"])
def test_the_video_task_trains(name: str, tmp_path: Path) -> None:
    few = ("trainer.updates=2", "rollout.group_size=4", "validation.samples_per_prompt=1", f"run.dir={tmp_path}")
    made = run(RECIPES / f"quickstart/video/{name}.yaml", *few, "tracking.mlflow.enabled=false")
    made.check_every_group_ended_once()
    base, last = made.summary.validation
    assert (base.version, last.version) == (0, 2) and base.parts["change"] > 15
    assert 0.2 < base.value < 0.8, "it does what was asked for as often as not"
    assert all(line["grad_norm"] > 0 for line in made.metrics)
    assert made.metrics[0]["log_ratio_nats/absmax"] < 1e-2, "engine and trainer compute the same"


def test_the_reading_task_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ("trainer.updates=3", "trainer.groups_per_update=4", "validation.samples_per_prompt=1", f"run.dir={tmp_path}")
    made = run(RECIPES / "quickstart/read_digits/read_digits.yaml", *few, "tracking.mlflow.enabled=false")
    made.check_every_group_ended_once()
    assert capsys.readouterr().out.count("answers/s ") == 3
    base, last = made.summary.validation
    assert (base.version, last.version) == (0, 3)
    assert 0.1 < base.value < 0.7, "it reads some images right"
    assert all(line["grad_norm"] > 0 for line in made.metrics)
    assert made.metrics[0]["engine_mismatch_nats"] < 1e-4, "engine and trainer compute the same"


def test_experts_train(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    few = ("trainer.updates=3", f"run.dir={tmp_path}", f"model.path={checkpoint_of('qwen3_omni')}")
    made = run(RECIPES / "tiny/qwen3_omni.yaml", *few, "run.runtime=inprocess").check_every_group_ended_once()
    assert len(made.metrics) == 3 and all(line["grad_norm"] > 0 for line in made.metrics)
    assert made.metrics[0]["engine_mismatch_nats"] < 1e-4, "engine and trainer compute the same"
    assert any("experts.gate_up_proj" in name for name in made.weights())


_PROGRAMS = {"python": [sys.executable], "omni-async": [sys.executable, "-m", "omni_async.cli"]}


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", sorted((RECIPES / "tiny").glob("*.yaml")), ids=lambda path: path.stem)
def test_commands_in_headers(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(RECIPES / "tiny", tmp_path / "recipes" / "tiny")
    monkeypatch.chdir(tmp_path)  # where run.dir is
    for command in re.findall(r"^#   (.+)$", recipe.read_text(encoding="utf-8"), flags=re.M):
        program, *arguments = shlex.split(command)
        command = [*_PROGRAMS[program], *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=ENVIRONMENT)
        assert (done.returncode, done.stderr) == (0, ""), done
        assert "warning: data.prompts" not in done.stdout, "no prompt is cut"

    made = left_behind(tmp_path / "recipes" / "tiny" / recipe.name).check_every_group_ended_once()
    assert made.config.staleness.max_updates == 2 and made.config.trainer.updates == 5
    assert made.summary.updates == 5 and 0 < made.summary.staleness_max <= 2
    assert made.summary.counters.rejected == 0, "the reward has a signal"
    assert made.summary.overlap_fraction > 0
    assert all(line["grad_norm"] > 0 for line in made.metrics)
    # A sample's log-prob is recomputed by the policy that drew it in the first update, so only rounding is between.
    assert made.metrics[0]["log_ratio_nats/absmax"] < 1e-2
