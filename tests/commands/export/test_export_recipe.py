"""Tests the recipe of an export: it names no path of the machine that trained."""

from __future__ import annotations

from pathlib import Path

from omni_async.commands.export.recipe import portable_recipe
from omni_async.config import load
from tests.support.configs import build


def test_paths_of_the_machine_are_names(tmp_path: Path):
    for name in ("model", "judge", "hub/models--Qwen--Qwen-Image/snapshots/0a"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "template.txt").touch()
    scorer = {"name": "mine:Mine", "params": {"files": [f"{tmp_path}/template.txt"], "text": "/think"}}
    config = build(
        {
            "model": {"path": str(tmp_path / "hub/models--Qwen--Qwen-Image/snapshots/0a"), "pipeline": "qwen_image"},
            "data": {"prompts": f"{tmp_path}/prompts.txt"},
            "run": {"dir": f"{tmp_path}/runs"},
            "checkpoint": {"resume": f"{tmp_path}/runs/one"},
            "reward": {"scorers": [scorer]},
            "tracking": {"mlflow": {"tracking_uri": f"sqlite:///{tmp_path}/mlflow.db"}},
        }
    )
    (tmp_path / "export").mkdir()
    recipe = tmp_path / "export" / "recipe.yaml"
    recipe.write_text(portable_recipe(config))
    assert str(tmp_path) not in recipe.read_text()
    found = load(recipe)
    assert found.model.path == str(tmp_path / "export" / "Qwen" / "Qwen-Image")
    assert found.data.prompts == str(tmp_path / "export" / "prompts.txt") and found.run.dir == "runs"
    assert found.reward.scorers[0].params == {"files": ["template.txt"], "text": "/think"}
    assert found.checkpoint.resume is None and found.tracking.mlflow.tracking_uri is None
