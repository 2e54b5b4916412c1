"""Tests kinds of rows and objectives of other packages."""

import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from omni_async.algorithms.checks import problems
from omni_async.algorithms.kinds import find_kind
from omni_async.cli import main
from omni_async.config import ConfigError, load, resolved_yaml, with_settings
from omni_async.config.schema import Config
from tests.support.fakes import TinyPolicy
from tests.support.places import ROOT
from tests.training import training_world as world
from tests.training.outside import EnergySettings

RECIPE = """\
model: {path: checkpoint}
data: {prompts: prompts.txt}
rollout: {sde: null}
reward: {scorers: [{name: ocr}]}
algorithm: {name: weighted_energy, settings: {scale: 2.0}}
"""


@pytest.fixture
def installed(install: Callable[[str], Path]) -> None:
    install(
        "[omni_async.kinds]\nends = tests.training.outside:KIND\n"
        "[omni_async.objectives]\nweighted_energy = tests.training.outside:OBJECTIVE\n"
    )


def ours(**changes: Any) -> Config:
    defaults = {
        "name": "weighted_energy",
        "sde": None,
        "clip_range": None,
        "correction": {},
        "settings": {"scale": 2.0},
    }
    return with_settings(world.make_config(**{**defaults, **changes}))


@pytest.mark.usefixtures("installed")
def test_a_kind_of_another_package_is_trained():
    engine = world.started(ours(size=3, settings={"scale": 2.0, "power": 3}))
    group, model, losses = world.group_of(engine), world.model_of(engine), []
    for t, advantage in zip(group.trajectories, group.advantages, strict=True):
        conditioning = TinyPolicy().stack_conditioning([t["conditioning"]]).double()
        sigma, mask = torch.full((1,), 0.5, dtype=torch.float64), conditioning["mask"].bool()
        velocity = model["transformer"](t["final"][None].double(), sigma, conditioning["text"], mask)
        losses.append(2.0 * advantage * velocity.abs().pow(3).mean())
    expected, before = world.gradients_of(losses, model), world.export(engine, 0)[0]
    metrics, found = world.trained(engine, group)
    world.assert_gradients(found, expected)
    assert metrics["loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    assert world.export(engine, 1)[0].digest != before.digest


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sde": {"kind": "flow"}}, "weighted_energy trains on final latents as they are, so an SDE window"),
        ({"correction": {"mode": "bypass"}}, "algorithm.correction: weighted_energy has no ratio"),
        ({"name": "awm"}, "algorithm.settings: these are settings of an objective of another package, and 'awm' has"),
    ],
)
def test_what_its_kind_cannot_use_is_refused(changes, said):
    [problem] = problems(ours(**changes))
    assert said in problem


@pytest.mark.usefixtures("installed")
def test_its_settings_are_a_section_of_the_recipe(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    for override, message in (
        ("settings={scale: 2.0, powr: 3}", r"algorithm\.settings\.powr: unknown key; did you mean 'power'\?"),
        ("settings.power=9", r"algorithm\.settings\.power: expected int >= 1, <= 4, got 9"),
        ("settings={}", r"algorithm\.settings\.scale: required, expected float > 0"),
        ("settings=3", r"algorithm\.settings: expected mapping, got 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(recipe, [f"algorithm.{override}"])
    config = load(recipe, ["algorithm.settings.power=4"])
    assert config.algorithm.settings == EnergySettings(scale=2.0, power=4)
    recipe.write_text(resolved_yaml(config))
    assert load(recipe) == config


def test_the_objective_that_the_documentation_writes_is_trained_as_it_is_written(install, monkeypatch, capsys):
    page = (ROOT / "docs" / "algorithms" / "own.md").read_text(encoding="utf-8")
    code, points, recipe = (
        re.search(rf"```{language}\n(.*?)```", page, flags=re.S)[1] for language in ("python", "toml", "yaml")
    )
    [(group, entries)] = tomllib.loads(points)["project"]["entry-points"].items()
    folder = install(f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items()))
    (folder / "my_objectives.py").write_text(code)
    monkeypatch.delitem(sys.modules, "my_objectives", raising=False)
    assert main(["list"]) == 0
    assert "algorithm.settings.pull: float >= 0. Weight of the squared log-ratio." in capsys.readouterr().out

    asked = {f"algorithm.{key}": value for key, value in yaml.safe_load(recipe)["algorithm"].items()}
    config = with_settings(world.make_config(**{"clip_range": None, **asked}))
    assert list(problems(config)) == []
    engine, losses = world.started(config), []
    group = world.group_of(engine)
    world.nudge(engine)

    def as_documented(steps: list[world.Step]) -> list[torch.Tensor]:
        losses.extend(-s.advantage * s.ratio + 5.0 * s.ratio.log().square() for s in steps)
        return losses

    metrics = world.assert_trains(engine, [group], as_documented)
    assert metrics["loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-4)
    assert metrics["pull"] > 0


def test_a_kind_that_is_not_installed_is_refused_with_the_known_ones():
    known = r"\['distillation', 'forward', 'preference', 'token', 'transition'\]"
    with pytest.raises(ValueError, match=rf"expected one of {known}, got 'ends'"):
        find_kind("ends")
