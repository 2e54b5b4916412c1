"""Tests what is estimated of the published recipes: that their models are known."""

from __future__ import annotations

import json
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from msgspec.structs import replace

from omni_async.commands.memory.command import memory_report
from omni_async.commands.memory.published import find_model, published_models
from omni_async.config import ConfigError, load
from omni_async.config.draws import drawn
from omni_async.diffusion.policy import load_policy
from omni_async.plugins.families import family_names, find_family
from tests.support.places import ROOT

DEVICE = "h100-80g"
_OTHERS = ("emulated", "quickstart", "tiny")
RECIPES = [
    path
    for path in sorted((ROOT / "recipes").glob("*/*.yaml"))
    if path.parent.name not in _OTHERS and drawn(load(path)) == "latents"  # memory is estimated of these alone
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{recipe.parent.name}/{recipe.stem}")
def test_the_model_of_a_published_recipe_is_known(recipe):
    family, path, source = find_model(load(recipe))
    assert path.name == Path(load(recipe).model.path).name
    assert source.startswith("no checkpoint at")
    policy = load_policy(family, str(path))
    assert policy.latent_shape(load(recipe).rollout.specs[0])


def test_published_models_are_installed_with_the_package():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = pyproject["tool"]["setuptools"]["package-data"]["omni_async_pipelines"]
    folders = [folder for name in family_names() for folder in published_models(find_family(name)).values()]
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    assert len(folders) >= 9
    for file in files:
        parts = file.relative_to(ROOT / "pipelines" / "omni_async_pipelines").parts
        assert any(
            len(parts) == len(Path(pattern).parts) and all(map(fnmatch, parts, Path(pattern).parts))
            for pattern in patterns
        ), file
        assert isinstance(json.loads(file.read_text()), dict)


def test_a_family_outside_packages_has_no_published_models():
    assert published_models(replace(find_family("qwen_image"), policy="my_policy:MyPolicy")) == {}


def test_a_checkpoint_that_is_there_counts(tmp_path):
    model = tmp_path / "my_model"
    model.mkdir()
    config = load(ROOT / "recipes/qwen_image_ocr/flow_grpo_lora.yaml", [f"model.path={model}"])
    with pytest.raises(
        ConfigError, match=r"model\.path: .*my_model has no model_index\.json.*expected one of Qwen-Image"
    ):
        find_model(config)
    (model / "model_index.json").write_text("{}")
    assert find_model(config)[1:] == (model, f"configuration of {model}")


def test_a_recipe_that_cannot_be_estimated_is_one_line():
    emulated = ROOT / "recipes/emulated/qwen_image_lora_h800.yaml"
    with pytest.raises(ConfigError, match=r"^emulation: .*\Z"):
        memory_report(load(emulated), DEVICE)
    quickstart = ROOT / "recipes/quickstart/quickstart.yaml"
    with pytest.raises(ConfigError, match=r"^--device: the recipe asks for no accelerator.*\Z"):
        memory_report(load(quickstart), DEVICE)
    with pytest.raises(ConfigError, match=r"^--device: expected one of .*h100-80g.* or a number of GiB, got 'h9000'"):
        memory_report(load(quickstart), "h9000")
