"""Tests recipes and the pages on algorithms: they are accepted, and name their sources and requirements."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from omni_async.algorithms.checks import problems
from omni_async.algorithms.kinds import find_kind
from omni_async.algorithms.registry import find_objective, objective_names
from omni_async.config import Config, load
from omni_async.data.prompts import load_prompts
from omni_async.data.split import shared_note
from omni_async.plugins.families import MediaShape, find_family
from omni_async.rewards import registry as scorers
from tests.config.recipe import MINIMAL, load_text
from tests.support.places import ROOT

RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
QUICKSTART = ROOT / "recipes" / "quickstart"
EMULATED = [path for path in RECIPES if path.is_relative_to(ROOT / "recipes" / "emulated")]
REAL = [path for path in RECIPES if path not in EMULATED]
TINY = ROOT / "recipes" / "tiny"
PUBLISHED = [path for path in REAL if not path.is_relative_to(QUICKSTART) and not path.is_relative_to(TINY)]
PAGES = sorted((ROOT / "docs" / "algorithms").glob("*.md"))
FRAGMENTS = [
    pytest.param(fragment, id=f"{page.stem}-{number}")
    for page in PAGES
    if page.stem != "own"  # whose objective is not installed; tests/training/test_kinds_from_outside.py trains it
    for number, fragment in enumerate(
        re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    )
]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def header_of(path: Path) -> str:
    """Returns the comment that the file opens with, as one text."""
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(lines[:end])


def num_gpus(config: Config) -> float:
    roles = ("rollout", "trainer", "reward")
    built_in = ((getattr(config, role).workers, getattr(config.placement, role)) for role in roles)
    pools = ((pool.workers, pool.resources) for pool in config.reward.pools)
    servers = ((server.replicas, server.resources) for server in config.reward.servers)
    return sum(workers * resources.gpus for workers, resources in (*built_in, *pools, *servers))


def test_shipped_prompts_are_trained_on_or_validate() -> None:
    for path in (path for path in REAL if path not in PUBLISHED):
        config = load(path)
        files = config.data.prompts, config.validation and config.validation.prompts
        if all(files):
            trained, validation = (load_prompts(str(file), "", 999) for file in files)
            assert shared_note(trained, validation) is None, path


@pytest.mark.parametrize("path", PUBLISHED, ids=name_of)
def test_published_recipes(path: Path) -> None:
    header, config = header_of(path), load(path)
    assert re.search(r"^# Source: \S+/\S+, \S+", header, flags=re.M), "a repository and a path in it"
    assert re.search(r"arXiv \d{4}\.\d{5}", header)
    assert re.search(r"^# Deviations:\n#   - ", header, flags=re.M)
    if config.model.dtype == "bfloat16" and find_kind(find_objective(config.algorithm.name).kind).ratio:
        assert config.algorithm.correction.mode in ("auto", "none", "decoupled"), "engine and trainer round differently"


@pytest.mark.parametrize("path", [*PUBLISHED, *EMULATED], ids=name_of)
def test_headers_count_gpus(path: Path) -> None:
    found = re.search(r"^# GPUs: (\d+)", header_of(path), flags=re.M)
    assert found and int(found[1]) == num_gpus(load(path))


@pytest.mark.parametrize("path", EMULATED, ids=name_of)
def test_emulated_recipes(path: Path) -> None:
    config, header = load(path), header_of(path)
    assert list(problems(config)) == []
    assert config.emulation is not None and config.emulation.profile == path.stem
    assert f"`{path.stem}`" in header
    assert re.search(r"^# Source: .*docs/profiles.md", header, flags=re.M | re.S)
    base = re.search(r"^extends: (\S+)$", path.read_text(encoding="utf-8"), flags=re.M)
    assert base and f"# Differs from {base[1]}:\n#   - " in header


@pytest.mark.parametrize("path", REAL, ids=name_of)
def test_recipes_are_accepted(path: Path) -> None:
    """Accepts a recipe whose pipeline or scorer is not installed only if its header names it."""
    config, header = load(path), header_of(path)
    assert list(problems(config)) == []
    try:
        find_family(config.model.pipeline)
        made = config.rollout.sampling.media()
    except ValueError:
        made = (MediaShape("image", (3, 64, 64)),)
        assert "needs a pipeline" in header and f"`{config.model.pipeline}`" in header
    for scorer in config.reward.scorers:
        try:
            scorers.check(scorer, made)
        except ValueError:
            assert "needs a scorer" in header and f"`{scorer.name}`" in header


def test_readmes_list_every_recipe() -> None:
    text = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    listed = [path for path in REAL if path.parent != QUICKSTART / "algorithms"]
    assert [path.name for path in listed if f"({path.relative_to(ROOT / 'recipes')})" not in text] == []
    assert "(emulated/README.md)" in text
    page = (ROOT / "recipes" / "emulated" / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in EMULATED if f"({path.name})" not in page] == []
    assert "`recipes/quickstart/algorithms/`" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_objective_has_recipe_and_page() -> None:
    on_latents = {name for name in objective_names() if find_kind(find_objective(name).kind).draws == "latents"}
    assert {load(path).algorithm.name for path in (QUICKSTART / "algorithms").glob("*.yaml")} == on_latents
    stems = {page.stem for page in PAGES}
    assert stems >= {*on_latents, "token"}
    tokens = (ROOT / "docs" / "algorithms" / "token.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in tokens for name in {*objective_names()} - on_latents)
    index = (ROOT / "docs" / "algorithms" / "index.md").read_text(encoding="utf-8")
    assert stems - {"index"} <= set(re.findall(r"\((\w+)\.md\)", index))


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_yaml_of_the_pages_is_accepted(fragment: str) -> None:
    sections = yaml.safe_load(fragment)
    rest = [line for line in MINIMAL.splitlines() if line.split(":")[0] not in sections]
    assert list(problems(load_text("\n".join([fragment, *rest])))) == []
