"""Tests that the examples run and do what their texts say."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples import one_update
from omni_async import cli
from omni_async.config import load
from tests.support.places import ROOT


async def test_one_update_trains_on_young_groups(capsys: Any) -> None:
    await one_update.main(updates=2)
    rows = re.findall(r"update (\d): reward (\d\.\d+), staleness \[(.+)\]", capsys.readouterr().out)
    assert [number for number, *_ in rows] == ["1", "2"]
    assert all(0 <= int(age) < int(number) for number, _, ages in rows for age in ages.split(", "))
    assert all(0 <= float(reward) <= 1 for _, reward, _ in rows)


def test_cluster_files_are_valid() -> None:
    """Checks the shell's syntax, the YAML, and that the commands in both are accepted."""
    script = ROOT / "examples" / "slurm" / "train.sbatch"
    subprocess.run(["bash", "-n", script], check=True, timeout=60)
    job = yaml.safe_load((ROOT / "examples" / "kuberay" / "rayjob.yaml").read_text(encoding="utf-8"))
    [batch] = re.findall(r"omni-async (.*?) &$", script.read_text().replace("\\\n", " "), flags=re.M)
    for command in (f"omni-async {batch}", job["spec"]["entrypoint"]):
        name, *words = shlex.split(command)
        assert name == "omni-async"
        options = cli._parse([word.replace("/shared/", "") for word in words])
        load(ROOT / "recipes/quickstart/quickstart.yaml", options.overrides)


@pytest.mark.slow
def test_the_notebook_runs_as_it_stands(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "examples").mkdir()
    notebook = nbformat.read(ROOT / "examples" / "own_reward.ipynb", as_version=4)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": tmp_path / "examples"}}).execute()
    shown = [str(cell.get("outputs", "")) for cell in notebook.cells]
    assert "'done'" in shown[-1]
    assert "update 2: reward 0." in shown[-4] and "images_per_s" in shown[-3]
    assert not any(cell.get("outputs") for cell in nbformat.read(ROOT / "examples/own_reward.ipynb", 4).cells)
