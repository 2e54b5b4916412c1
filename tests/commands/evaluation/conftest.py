"""Provides a run of seconds with validation and a checkpoint per update, shared by all tests; none may change it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands.evaluation import judging
from tests.support.job_world import Run, run, write_recipe

SETTINGS = (
    "trainer.updates=3",
    "checkpoint.every=1",
    "reward.scorers=[{name: 'tests.commands.evaluation.judging:Brightness'}]",
    "reward.probe=false",
    "reward.backoff_s=0",
)
PROMPTS = ("the digit 7", "a red digit", "the white circle")


def validated(folder: Path, checkpoint: str, *overrides: str) -> Run:
    """Trains a run whose rounds are of the first and the last version, of which nothing newer is drawn meanwhile."""
    recipe = write_recipe(folder, checkpoint)
    (folder / "validation.txt").write_text("\n".join(PROMPTS))
    about = f"{{every: 3, prompts: {folder}/validation.txt, samples_per_prompt: 2, num_inference_steps: 5}}"
    return run(recipe, *SETTINGS, f"validation={about}", *overrides)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, checkpoint: str) -> Run:
    return validated(tmp_path_factory.mktemp("evaluation"), checkpoint)


@pytest.fixture(scope="session")
def lora(tmp_path_factory: pytest.TempPathFactory, checkpoint: str) -> Run:
    """Provides one that trains adapters."""
    return validated(
        tmp_path_factory.mktemp("lora"),
        checkpoint,
        "model.lora={rank: 2, alpha: 64}",
        "trainer.optimizer.lr=100",
        "trainer.ema={every: 1}",
    )


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Works in a folder of its own, with a judge that was asked nothing yet."""
    monkeypatch.chdir(tmp_path)
    judging.calls.clear()
    judging.impatient.clear()
    yield
