"""Tests `extends`: a recipe that gives only its differences."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipe import MINIMAL, complaint_about

from omni_async.config import load, resolved_yaml


def write(folder: Path, **files: str) -> Path:
    """Writes files by stem; returns the path of the one called `own`."""
    folder.mkdir(parents=True, exist_ok=True)
    for stem, text in files.items():
        (folder / f"{stem}.yaml").write_text(text)
    return folder / "own.yaml"


def test_sections_are_merged_key_by_key_and_everything_else_is_replaced(tmp_path: Path) -> None:
    base = MINIMAL + (
        "rollout: {workers: 3, group_size: 6, sde: {kind: cps, noise_level: 0.8, window: {size: 3, range: [0, 4]}}}\n"
        "trainer: {updates: 7, optimizer: {lr: 0.5, betas: [0.1, 0.2]}}\n"
        "validation: {prompts: held_out.txt}\n"
    )
    own = (
        "extends: base.yaml\n"
        "rollout: {group_size: 4, sde: {noise_level: 0.5, window: {range: [1, 5]}}}\n"
        "trainer: {optimizer: {betas: [0.3, 0.4]}}\n"
        "reward: {scorers: [{name: jpeg_size}]}\n"
        "validation: null\n"
    )
    config = load(write(tmp_path, base=base, own=own))
    assert (config.rollout.workers, config.rollout.group_size) == (3, 4)
    sde = config.rollout.sde
    assert sde is not None and (sde.kind, sde.noise_level, sde.window.size, sde.window.range) == ("cps", 0.5, 3, (1, 5))
    assert (config.trainer.updates, config.trainer.optimizer.lr, config.trainer.optimizer.betas) == (7, 0.5, (0.3, 0.4))
    assert [scorer.name for scorer in config.reward.scorers] == ["jpeg_size"], "a list is one value"
    assert config.validation is None


def test_a_section_can_be_taken_away_and_given_back(tmp_path: Path) -> None:
    files = {
        "base": MINIMAL + "rollout: {sde: {kind: dance}}\n",
        "without": "extends: base.yaml\nrollout: {sde: null}\n",
        "own": "extends: without.yaml\nrollout: {sde: {noise_level: 0.3}}\n",
    }
    own = write(tmp_path, **files)
    assert load(tmp_path / "without.yaml").rollout.sde is None
    sde = load(own).rollout.sde
    assert sde is not None and (sde.kind, sde.noise_level) == ("flow", 0.3), "nothing is left of what was taken away"


def test_paths_start_at_the_file_that_says_them(tmp_path: Path) -> None:
    write(tmp_path / "base", base=MINIMAL)
    own = write(
        tmp_path / "mine", own="extends: ../base/base.yaml\ndata: {prompts: p.txt}\nvalidation: {prompts: v.txt}\n"
    )
    config = load(own)
    assert config.model.path == str(tmp_path / "base" / "checkpoints" / "tiny")
    assert config.data.prompts == str(tmp_path / "mine" / "p.txt")
    assert config.validation is not None and config.validation.prompts == str(tmp_path / "mine" / "v.txt")


def test_overrides_come_last_and_a_resolved_configuration_stands_alone(tmp_path: Path) -> None:
    own = write(tmp_path, base=MINIMAL + "run: {seed: 1, name: base}\n", own="extends: base.yaml\nrun: {seed: 2}\n")
    config = load(own, ["run.seed=3"])
    assert (config.run.seed, config.run.name) == (3, "base")
    text = resolved_yaml(config)
    assert "extends" not in text
    assert load(write(tmp_path / "elsewhere", own=text)) == config


def test_a_chain_of_recipes_is_followed(tmp_path: Path) -> None:
    links = {f"link{i}": f"extends: link{i + 1}.yaml\nrun: {{seed: {i}}}\n" for i in range(7)}
    own = write(tmp_path, own="extends: link0.yaml\n", **links, link7=MINIMAL + "run: {seed: 99, name: last}\n")
    config = load(own)
    assert (config.run.seed, config.run.name) == (0, "last")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"own": "extends: own.yaml\n"}, "own.yaml: extends: recipes extend each other in a circle"),
        ({"own": "extends: other.yaml\n", "other": "extends: ./own.yaml\n"}, "extends: recipes extend each other in"),
        ({"own": "extends: nowhere.yaml\n"}, "own.yaml extends it)"),
        ({"own": "extends: [base.yaml]\n"}, "own.yaml: extends: expected the path of a recipe, got ['base.yaml']"),
        ({"own": "extends: 3\n"}, "own.yaml: extends: expected the path of a recipe, got 3"),
        ({"own": "extends: .\n"}, "cannot be read: it is a folder, not a file"),
        ({"own": 'extends: "a\\0b"\n'}, "cannot be read: embedded null byte"),
        ({"own": "extends: base.yaml\n", "base": "- a\n"}, "base.yaml: expected a mapping of sections, got list"),
        ({"own": "extends: base.yaml\n", "base": "model: [\n"}, "base.yaml:2:1: not valid YAML"),
        (
            {"own": "extends: base.yaml\n", "base": MINIMAL + "rollout: {timeout_s: .inf}\n"},
            "base.yaml: rollout.timeout_s: expected a finite",
        ),
        (
            {"own": "extends: base.yaml\n", "base": MINIMAL + "trainer: {updtes: 1}\n"},
            "trainer.updtes: unknown key; did you mean 'updates'?",
        ),
        (
            {"own": "extends: base.yaml\nrollout: {group_size: 0}\n", "base": MINIMAL},
            "rollout.group_size: expected int >= 1, got 0",
        ),
        (
            {"own": "extends: base.yaml\nrollout: 3\n", "base": MINIMAL + "rollout: {workers: 2}\n"},
            "rollout: expected mapping, got 3",
        ),
    ],
)
def test_a_base_that_cannot_be_used_is_one_line(tmp_path: Path, files: dict[str, str], said: str) -> None:
    assert said in complaint_about(write(tmp_path, **files))


def test_a_chain_without_end_is_refused(tmp_path: Path) -> None:
    links = {f"link{i}": f"extends: link{i + 1}.yaml\n" for i in range(12)}
    assert "more than 8 deep" in complaint_about(write(tmp_path, own="extends: link0.yaml\n", **links, link12=MINIMAL))


def test_only_a_recipe_and_no_override_may_extend(tmp_path: Path) -> None:
    assert "extends: unknown key" in complaint_about(write(tmp_path, own=MINIMAL), "extends=base.yaml")
