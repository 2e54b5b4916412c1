"""Runs one update of every published recipe whose model family is installed, in one process and on a random checkpoint:
fewer, smaller samples and no accelerators, everything else as the recipe says."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from omni_async.config import load
from omni_async.families import family_names
from tests.e2e.runs import check_every_group_ended_once, run

pytestmark = [pytest.mark.slow]

RECIPES = Path(__file__).parents[2] / "recipes"
PUBLISHED = [
    path
    for folder in ("qwen_image_ocr", "sd35_ocr", "wan22_dance")
    for path in sorted((RECIPES / folder).glob("*.yaml"))
    if load(path).model.pipeline in family_names()
]
_SMALL = (
    "run.runtime=inprocess",
    "rollout.engine=diffusers",
    "rollout.workers=1",
    "reward.workers=1",
    "trainer.workers=1",
    "rollout.group_size=4",
    "rollout.sampling.height=32",
    "rollout.sampling.width=32",
    "trainer.groups_per_update=4",  # a multiple of every recipe's steps_per_update
    "trainer.updates=1",
    "placement.rollout.gpus=0",
    "placement.reward.gpus=0",
    "placement.trainer.gpus=0",
    "validation.num_inference_steps=4",
    "tracking.mlflow.enabled=false",
)
_REWARD = {"image": "jpeg_size", "video": "motion_smoothness"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def build(family: str) -> Path:
        options = {"ti2v": True} if family == "wan2_2" else {}  # what the published recipe trains
        path: Path = import_module(f"pipelines.{family}.tiny").build(
            tmp_path_factory.mktemp(family) / "tiny", **options
        )
        return path

    return build


@pytest.mark.parametrize("recipe", PUBLISHED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_published_recipe_trains_at_test_size(
    recipe: Path, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text('a sign that says "open"\na shop called "7 cats"\n')
    asked = load(recipe)
    made = run(
        recipe,
        *_SMALL,
        f"run.dir={tmp_path / 'runs'}",
        f"model.path={checkpoint(asked.model.pipeline)}",
        f"data.prompts={tmp_path / 'prompts.txt'}",
        f"validation.prompts={tmp_path / 'prompts.txt'}",
        # Nothing can be read in noise, and groups of equal rewards are not trained.
        f"reward.scorers=[{{name: {_REWARD[asked.rollout.sampling.media()[0].part]}}}]",
    )
    check_every_group_ended_once(made)
    [update] = made.metrics
    assert made.summary.status == "done" and update["grad_norm"] > 0
    assert [point.version for point in made.summary.validation] == [0, 1]
    weights = made.weights()
    assert all("lora" in name for name in weights) == (asked.model.lora is not None)
