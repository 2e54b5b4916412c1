"""Tests what is estimated of the published recipes: the table of docs/memory.md, and that their models are known."""

from __future__ import annotations

import json
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.memory_table import DEVICE, PAGE, ROOT, published_recipes, rows_of
from omni_async.commands.memory.command import memory_report
from omni_async.commands.memory.published import find_model, published_models
from omni_async.config import ConfigError, load
from omni_async.diffusion.policy import load_policy
from omni_async.plugins.families import family_names, find_family

RECIPES = published_recipes()


@pytest.mark.thorough  # tests/commands/memory/test_verdict.py always runs one
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{recipe.parent.name}/{recipe.stem}")
def test_the_pages_table_is_what_is_estimated(recipe):
    name = f"| {recipe.parent.name}/{recipe.stem} |"
    page = PAGE.read_text(encoding="utf-8").splitlines()
    assert [line for line in page if line.startswith(name)] == rows_of(recipe)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{recipe.parent.name}/{recipe.stem}")
def test_a_recipes_comment_has_the_pages_numbers(recipe):
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    own = [row for row in rows if row[0] == f"{recipe.parent.name}/{recipe.stem}"]
    known = ", ".join(f"{row[1].partition(' x ')[0]} {row[6]}" for row in own if "unknown" not in row)
    [line] = [line for line in recipe.read_text().splitlines() if line.startswith("# Memory, estimated")]
    assert line == f"# Memory, estimated (docs/memory.md): {known} of the 79.1 GiB of an 80 GB device."


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
