"""Tests that a real run is never resumed with something else in silence, and that its earlier checkpoints stay what
they were. The rules of each key are tested in tests/checkpoint/test_statement.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from omni_async import cli
from omni_async.checkpoint.folders import MANIFEST_FILE, write_manifest
from omni_async.checkpoint.state import read_state, write_state
from omni_async.config import ConfigError, load
from omni_async.runtime.driver.train import train
from omni_async.runtime.preflight.check import preflight
from tests.support.job_world import Run, run, write_recipe

_SMALL = (
    *("trainer.updates=1", "trainer.groups_per_update=1", "trainer.optimizer.name=adamw", "trainer.optimizer.lr=0.01"),
    *("rollout.group_size=2", "checkpoint.every=1", "checkpoint.keep=9", "model.lora={rank: 4, alpha: 8}"),
)


class Job:
    """A run of adapters with one update, in copies of its recipe, model and folder."""

    def __init__(self, first: Run, folder: Path) -> None:
        self.model = shutil.copytree(first.config.model.path, folder / "model")
        self.recipe, self.out = write_recipe(folder, str(self.model)), folder
        self.folder = shutil.copytree(first.path, folder / "runs" / first.path.name)
        self.update = self.folder / "checkpoints" / "update-000001"

    def resumed(self, *overrides: str) -> tuple[str, ...]:
        where = (f"run.dir={self.folder.parent}", f"checkpoint.resume={self.folder}")
        return (*_SMALL, *where, "trainer.updates=2", *overrides)

    def notes(self, *overrides: str) -> list[str]:
        """Returns the console's lines about changes."""
        found = preflight(load(self.recipe, self.resumed(*overrides))).notes
        return [note for note in found if not note.startswith("continuing ")]

    def refusal(self, *overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            self.notes(*overrides)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def exported(self, name: str) -> tuple[bytes, ...]:
        """Exports the first checkpoint and returns its weights and recipe."""
        assert cli.main(["export", str(self.update), "--out", str(self.out / name)]) == 0
        return tuple(
            (self.out / name / file).read_bytes() for file in ("pytorch_lora_weights.safetensors", "recipe.yaml")
        )

    def drawn(self, name: str) -> list[bytes]:
        words = ["sample", str(self.update), "--prompt", "the digit 7", "--steps", "2", "--out", str(self.out / name)]
        assert cli.main(words) == 0
        return [file.read_bytes() for file in sorted((self.out / name).glob("update-*/*.png"))]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, checkpoint: str) -> Run:
    folder = tmp_path_factory.mktemp("first")
    model = shutil.copytree(checkpoint, folder / "model")
    return run(write_recipe(folder, str(model)), *_SMALL, f"run.dir={folder / 'runs'}")


@pytest.fixture
def job(first: Run, tmp_path: Path) -> Job:
    return Job(first, tmp_path)


def test_earlier_checkpoints_stay_to_the_bit(job: Job) -> None:
    exported, drawn = job.exported("before"), job.drawn("drawn before")
    changed = ("trainer.optimizer.lr=0.02", "run.seed=9", "algorithm.clip_range_nats=2.0", "staleness.max_updates=1")
    again = run(job.recipe, *job.resumed(*changed))
    assert again.path == job.folder and again.summary.updates == 2
    recorded = [json.loads(line) for line in (job.folder / "changes.jsonl").read_text().splitlines()]
    assert {"update": 1, "key": "run.seed", "before": 3, "now": 9} in recorded and len(recorded) == len(changed)
    # The run's own recipe counts for nothing.
    text = (job.folder / "config.yaml").read_text()
    (job.folder / "config.yaml").write_text(text.replace("alpha: 8.0", "alpha: 64.0"))
    assert job.exported("after") == exported
    assert "| seed | 3 |" in (job.out / "after" / "README.md").read_text()
    assert drawn and job.drawn("drawn after") == drawn


def test_a_checkpoint_of_an_earlier_version(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """It states no recipe: the run's own is read."""
    before, state = job.exported("before"), read_state(job.update)
    write_state(job.update, replace(state, statement=None, engine={"optimizer_steps": state.version}))
    (job.update / MANIFEST_FILE).unlink()
    write_manifest(job.update)
    capsys.readouterr()
    assert job.exported("after") == before
    assert "checkpoints of an earlier version state no recipe; config.yaml is read instead" in capsys.readouterr().err
    for named in ((), (f"checkpoint.resume={job.update}",)):
        said = job.refusal("model.lora.alpha=64", *named)
        assert "model.lora.alpha: the checkpoint has 8, the recipe 64" in said
    [note] = job.notes()
    assert note.startswith("warning: update-000001 is of an earlier version and states no recipe; it is compared with")
    assert run(job.recipe, *job.resumed()).summary.updates == 2
    assert read_state(job.folder / "checkpoints" / "update-000002").statement is not None


def test_other_files_at_the_same_path(job: Job, capsys, monkeypatch):
    prompts = job.recipe.parent / "prompts.txt"
    assert job.notes() == []
    prompts.write_text(prompts.read_text() + "one more\n")
    named = "changed since update-000001: data.prompts: the content that the checkpoint states -> other content"
    assert job.notes() == [named]
    prompts.write_text(prompts.read_text().removesuffix("one more\n"))

    moved, file = job.out / "moved", job.model / "transformer" / "diffusion_pytorch_model.safetensors"
    shutil.copytree(job.model, moved)
    tensors = load_file(file)
    tensors[max(tensors, key=lambda one: tensors[one].numel())].view(-1)[1] += 1.0
    save_file(tensors, file, {"format": "pt"})
    assert "model.path/transformer: its content is not what the checkpoint states" in job.refusal()
    export = ["export", str(job.update), "--base"]
    assert cli.main([*export, str(job.model), "--out", str(job.out / "refused")]) == 2
    assert "/transformer: it is another base model than update-000001 was trained from" in capsys.readouterr().err
    assert cli.main([*export, str(moved), "--out", str(job.out / "moved base")]) == 0
    assert job.notes(f"model.path={moved}") == []
    with monkeypatch.context() as patched:  # as if no changed piece were read: the trainer compares every byte
        patched.setattr("omni_async.runtime.preflight.check.contents_of", lambda *_: {})
        summary = train(preflight(load(job.recipe, job.resumed())))
    assert summary.status == "failed" and "it was trained from weights of digest" in str(summary.reason)
    assert run(job.recipe, *job.resumed(f"model.path={moved}")).summary.updates == 2
