"""Provides runs of seconds with validation and a checkpoint per update; no test may change them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands.scoring import judges
from tests.support.job_world import Run, run, write_recipe

SETTINGS = (
    "trainer.updates=3",
    "checkpoint.every=1",
    "reward.scorers=[{name: 'tests.commands.scoring.judges:Brightness'}]",
    "reward.probe=false",
    "reward.backoff_s=0",
)
PROMPTS = ("the digit 7", "a red digit", "the white circle")


def validated(folder: Path, checkpoint: str, *overrides: str) -> Run:
    recipe = write_recipe(folder, checkpoint)
    (folder / "validation.txt").write_text("\n".join(PROMPTS))
    about = f"{{every: 3, prompts: {folder}/validation.txt, samples_per_prompt: 2, num_inference_steps: 5}}"
    return run(recipe, *SETTINGS, f"validation={about}", *overrides)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, checkpoint: str) -> Run:
    return validated(tmp_path_factory.mktemp("evaluation"), checkpoint)


@pytest.fixture(scope="session")
def lora(tmp_path_factory: pytest.TempPathFactory, checkpoint: str) -> Run:
    keys = ("model.lora={rank: 2, alpha: 64}", "trainer.optimizer.lr=100", "trainer.ema={every: 1}")
    return validated(tmp_path_factory.mktemp("lora"), checkpoint, *keys)


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    judges.calls.clear()
    judges.impatient.clear()
