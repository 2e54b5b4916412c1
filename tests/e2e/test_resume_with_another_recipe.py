"""Tests that a run is never continued with something else in silence, and that its earlier checkpoints stay what they
were: real runs of seconds in this process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

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


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, checkpoint: str) -> Run:
    """A run of adapters with one update, which no test may change."""
    folder = tmp_path_factory.mktemp("first")
    model = shutil.copytree(checkpoint, folder / "model")
    return run(write_recipe(folder, str(model)), *_SMALL, f"run.dir={folder / 'runs'}")


@pytest.fixture
def job(first: Run, tmp_path: Path) -> tuple[Path, Path, Path]:
    """Copies of its recipe, its model and its run's folder."""
    recipe = write_recipe(tmp_path, str(shutil.copytree(first.config.model.path, tmp_path / "model")))
    return recipe, tmp_path / "model", shutil.copytree(first.path, tmp_path / "runs" / first.path.name)


def resumed(recipe: Path, folder: Path, *overrides: str) -> tuple[str, ...]:
    return (*_SMALL, f"run.dir={folder.parent}", f"checkpoint.resume={folder}", "trainer.updates=2", *overrides)


def notes(recipe: Path, folder: Path, *overrides: str) -> list[str]:
    """Returns what the console would say of the changes."""
    found = preflight(load(recipe, resumed(recipe, folder, *overrides))).notes
    return [note for note in found if not note.startswith("going on with")]


def refusal(recipe: Path, folder: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        preflight(load(recipe, resumed(recipe, folder, *overrides)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def exported(checkpoint: Path, out: Path) -> bytes:
    assert cli.main(["export", str(checkpoint), "--out", str(out)]) == 0
    return (out / "pytorch_lora_weights.safetensors").read_bytes()


def changed_weights(model: Path, value: float = 1.0) -> None:
    file = model / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    name = max(tensors, key=lambda one: tensors[one].numel())
    tensors[name].view(-1)[1] += value
    save_file(tensors, file, {"format": "pt"})


def unstated(checkpoint: Path) -> None:
    """Makes a checkpoint one of an earlier version."""
    state = read_state(checkpoint)
    write_state(checkpoint, replace(state, statement=None, engine={"optimizer_steps": state.version}))
    (checkpoint / MANIFEST_FILE).unlink()
    write_manifest(checkpoint)


def test_another_alpha_is_refused_before_anything_starts(job: Any) -> None:
    recipe, _, folder = job
    line = refusal(recipe, folder, "model.lora.alpha=64")
    assert (
        "model.lora.alpha: the checkpoint has 8, the recipe 64; keep 8 (the policy would jump by the factor 8)" in line
    )
    named = f"checkpoint.resume={folder / 'checkpoints' / 'update-000001'}"
    assert "model.lora.alpha: the checkpoint has 8, the recipe 64" in refusal(
        recipe, folder, "model.lora.alpha=64", named
    )


def test_exports_of_earlier_checkpoints_stay_to_the_bit_whatever_the_run_continues_with(
    job: Any, tmp_path: Path
) -> None:
    recipe, _, folder = job
    update = folder / "checkpoints" / "update-000001"
    before = exported(update, tmp_path / "before")
    card = (tmp_path / "before" / "README.md").read_text()
    changed = ("trainer.optimizer.lr=0.02", "run.seed=9", "algorithm.clip_range_nats=2.0", "staleness.max_updates=1")
    again = run(recipe, *resumed(recipe, folder, *changed))
    assert again.path == folder and again.summary.updates == 2
    assert exported(update, tmp_path / "after") == before
    assert (tmp_path / "after" / "recipe.yaml").read_bytes() == (tmp_path / "before" / "recipe.yaml").read_bytes()
    assert [line for line in card.splitlines() if line.startswith("| seed")] == ["| seed | 3 |"]
    assert "| seed | 3 |" in (tmp_path / "after" / "README.md").read_text()
    exported(folder / "checkpoints" / "update-000002", tmp_path / "newer")
    assert "| seed | 9 |" in (tmp_path / "newer" / "README.md").read_text()
    recorded = [json.loads(line) for line in (folder / "changes.jsonl").read_text().splitlines()]
    assert {"update": 1, "key": "run.seed", "before": 3, "now": 9} in recorded and len(recorded) == len(changed)
    # The run's own recipe counts for nothing.
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("alpha: 8.0", "alpha: 64.0"))
    assert exported(update, tmp_path / "edited") == before


def test_a_checkpoint_of_an_earlier_version_is_read_with_its_run_s_recipe_and_that_is_said(
    job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, _, folder = job
    update = folder / "checkpoints" / "update-000001"
    before = exported(update, tmp_path / "before")
    unstated(update)
    capsys.readouterr()
    assert exported(update, tmp_path / "after") == before
    assert "checkpoints of an earlier version state no recipe; config.yaml is read instead" in capsys.readouterr().err
    assert "model.lora.alpha: the checkpoint has 8, the recipe 64" in refusal(recipe, folder, "model.lora.alpha=64")
    [note] = notes(recipe, folder)
    assert note == (
        f"warning: update-000001 is of an earlier version and states no recipe; it is compared with"
        f" {folder / 'config.yaml'}"
    )
    again = run(recipe, *resumed(recipe, folder))
    assert again.summary.updates == 2
    assert read_state(folder / "checkpoints" / "update-000002").statement is not None


def test_other_weights_at_the_same_path_are_refused_and_the_same_elsewhere_are_not(
    job: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, model, folder = job
    update, moved = folder / "checkpoints" / "update-000001", shutil.copytree(model, tmp_path / "moved")
    changed_weights(model)
    assert "model.path/transformer: its content is not what the checkpoint states" in refusal(recipe, folder)
    assert cli.main(["export", str(update), "--out", str(tmp_path / "refused"), "--base", str(model)]) == 2
    assert "/transformer: it is another base model than update-000001 was trained from" in capsys.readouterr().err
    assert cli.main(["export", str(update), "--out", str(tmp_path / "moved_base"), "--base", str(moved)]) == 0
    assert notes(recipe, folder, f"model.path={moved}") == []
    assert run(recipe, *resumed(recipe, folder, f"model.path={moved}")).summary.updates == 2


def test_the_trainer_compares_every_byte_of_the_weights_that_it_loads(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, model, folder = job
    changed_weights(model)
    monkeypatch.setattr(
        "omni_async.runtime.preflight.check.contents_of", lambda *_: {}
    )  # as if no changed piece were read
    summary = train(preflight(load(recipe, resumed(recipe, folder))))
    assert summary.status == "failed" and "it was trained from weights of digest" in str(summary.reason)


def test_other_prompts_are_named(job: Any) -> None:
    recipe, _, folder = job
    prompts = recipe.parent / "prompts.txt"
    assert notes(recipe, folder) == []
    prompts.write_text(prompts.read_text() + "one more\n")
    named = "changed since update-000001: data.prompts: the content that the checkpoint states -> other content"
    assert notes(recipe, folder) == [named]
    same = prompts.rename(prompts.with_name("elsewhere.txt"))
    same.write_text(same.read_text().removesuffix("one more\n"))
    assert notes(recipe, folder, f"data.prompts={same}") == []


def test_a_sample_is_drawn_with_the_scale_that_its_checkpoint_states(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, folder = job
    monkeypatch.chdir(tmp_path)
    words = ["sample", str(folder), "--prompt", "the digit 7", "--steps", "2"]
    assert cli.main([*words, "--out", "before"]) == 0
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("alpha: 8.0", "alpha: 64.0"))
    assert cli.main([*words, "--out", "after"]) == 0
    before, after = (sorted(Path(name).glob("update-*/*.png")) for name in ("before", "after"))
    assert before and [file.read_bytes() for file in before] == [file.read_bytes() for file in after]
