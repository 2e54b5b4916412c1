"""Provides runs that an earlier version recorded: `tests/records/read/recorded` has them, its README how they were
made."""

from __future__ import annotations

import shutil
from pathlib import Path

from omni_async_pipelines.qwen_image.tiny import build

from tests.support.places import ROOT

FOLDER = ROOT / "tests" / "records" / "read" / "recorded"
_ROOT = "/tmp/recorded"  # where they were made, as their configurations name it


def build_model(path: str | Path) -> Path:
    """Builds the model that the runs trained, from its seed."""
    return build(path, hidden=16, layers=1, heads=1, head_dim=16, vae_base_dim=4, vae_dim_mult=(1, 1, 1, 1))


def place(folder: Path) -> Path:
    """Copies the runs to `folder`/runs, with recipe, prompts and model in `folder`, and returns `folder`/runs."""
    build_model(folder / "model")
    for file in FOLDER.glob("*.*"):
        if file.is_file():
            shutil.copy(file, folder)
    runs = folder / "runs"
    for run in FOLDER.iterdir():
        if run.is_dir():
            shutil.copytree(run, runs / run.name)
            config = runs / run.name / "config.yaml"
            config.write_text(config.read_text().replace(_ROOT, str(folder)))
    return runs
