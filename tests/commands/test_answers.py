"""Tests `export`, `sample` and `eval` of a thinker that answers in text, on the checkpoint of `read_digits`."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omni_async_pipelines.qwen3_omni import tiny as tiny3
from omni_async_pipelines.qwen3_omni.policy import Qwen3OmniPolicy
from omni_async_pipelines.qwen_omni.policy import QwenOmniPolicy
from safetensors.torch import load_file
from torch import Tensor

from omni_async.cli import main
from omni_async.commands.evaluation.models import EXPORTED_RECIPE, PEFT_ADAPTERS
from omni_async.commands.export.base import BaseModel
from omni_async.config import load, resolved_yaml
from omni_async.weights.lora import diffusers_name
from tests.commands.export.export_world import VERSION, Trained, write_checkpoint
from tests.support.places import ROOT
from tests.training.training_world import nudge, started

RECIPE = ROOT / "recipes" / "quickstart" / "read_digits" / "read_digits.yaml"
LABEL = f"update-{VERSION:06d}"
Capture = pytest.CaptureFixture[str]


def trained_thinker(folder: Path, *overrides: str, by: float, policy: type[QwenOmniPolicy] = QwenOmniPolicy) -> Trained:
    """Makes a run of the recipe whose weights have moved, with a checkpoint."""
    run = folder / "runs" / "read-20260101-120000"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(resolved_yaml(load(RECIPE, overrides)))
    config = load(run / "config.yaml")
    engine = started(config, policy(config.model.path))
    nudge(engine, by)
    write_checkpoint(run, config, engine)
    return Trained(run, config, engine)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained_thinker(tmp_path_factory.mktemp("full"), by=0.02)


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    adapters = "model.lora={rank: 2, alpha: 3.0, target_modules: [q_proj, v_proj]}"
    return trained_thinker(tmp_path_factory.mktemp("lora"), adapters, by=0.1)


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def loaded(capsys: Capture, *arguments: Any) -> dict[str, Any]:
    """Exports, runs the Python that the last line names, and returns its variables."""
    assert main(["export", *map(str, arguments)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    names: dict[str, Any] = {}
    thinkers = "Qwen2_5OmniThinkerForConditionalGeneration, Qwen3OmniMoeThinkerForConditionalGeneration"
    exec(f"from transformers import AutoProcessor, {thinkers}", names)
    exec(last.removeprefix("load it: "), names)
    return names


def weights_of(trained: Trained) -> dict[str, Tensor]:
    """Returns the trainer's weights, under the names in the checkpoint's files."""
    thinker = trained.engine._model.components["thinker"]
    return {diffusers_name(f"thinker.{name}"): weight for name, weight in thinker.state_dict().items()}


@torch.no_grad()
def logits_of(names: dict[str, Any]) -> Tensor:
    ids = torch.arange(40, 52)[None]
    found: Tensor = names["model"](input_ids=ids).logits
    return found


def answers(folder: Path, label: str = LABEL) -> list[str]:
    return [row["text"] for row in rows(folder, label)]


def rows(folder: Path, label: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / label / "samples.jsonl").read_text().splitlines()]
    return sorted(found, key=lambda row: str(row["sample_id"]))


def test_transformers_loads_a_whole_model(trained: Trained, tmp_path: Path, capsys: Capture) -> None:
    names = loaded(capsys, trained.run, "--out", tmp_path / "out")
    base, mine = Path(trained.config.model.path), weights_of(trained)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    before = load_file(base / "model.safetensors")
    assert stored.keys() == before.keys() == mine.keys()
    assert all(torch.equal(stored[name], weight) for name, weight in mine.items())
    assert {name for name in mine if torch.equal(before[name], mine[name])} == {
        name for name in mine if name.startswith(("thinker.visual.", "thinker.audio_tower."))
    }, "only towers stay"
    model = {f"thinker.{name}": weight for name, weight in names["model"].state_dict().items()}
    assert model.keys() == mine.keys() and all(torch.equal(model[name], weight) for name, weight in mine.items())
    assert names["processor"].tokenizer("7").input_ids == trained.engine.policy.processor.tokenizer("7").input_ids
    copied = {path.name for path in base.iterdir()} - {"README.md", "model.safetensors"}
    assert all((tmp_path / "out" / name).read_bytes() == (base / name).read_bytes() for name in copied)
    card = (tmp_path / "out" / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert (front["library_name"], front["pipeline_tag"]) == ("transformers", "image-text-to-text")
    assert "denoising" not in card and "diffusers" not in card


def test_transformers_loads_experts(tmp_path: Path, capsys: Capture) -> None:
    """They are one tensor in the trainer, and one for each expert in files."""
    base = tiny3.build(tmp_path / "base")
    trained = trained_thinker(
        tmp_path, "model.pipeline=qwen3_omni", f"model.path={base}", by=0.02, policy=Qwen3OmniPolicy
    )
    model = loaded(capsys, trained.run, "--out", tmp_path / "out")["model"]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    before = load_file(base / "model.safetensors")
    assert {name: one.shape for name, one in stored.items()} == {name: one.shape for name, one in before.items()}
    expert = "thinker.model.layers.1.mlp.experts.3.up_proj.weight"
    assert not torch.equal(stored[expert], before[expert])
    mine = weights_of(trained)
    found = {f"thinker.{name}": weight for name, weight in model.state_dict().items()}
    assert found.keys() == mine.keys() and all(torch.equal(found[name], weight) for name, weight in mine.items())


def test_adapters_and_their_merged_model_are_the_same(lora: Trained, tmp_path: Path, capsys: Capture) -> None:
    merged = loaded(capsys, lora.run, "--merged", "--out", tmp_path / "merged")
    adapted = loaded(capsys, lora.run, "--out", tmp_path / "adapters")
    base, mine = load_file(Path(lora.config.model.path) / "model.safetensors"), weights_of(lora)
    layer = "thinker.model.layers.0.self_attn.q_proj"
    expected = base[f"{layer}.weight"] + 1.5 * mine[f"{layer}.lora_B.weight"] @ mine[f"{layer}.lora_A.weight"]
    found = load_file(tmp_path / "merged" / "model.safetensors")
    torch.testing.assert_close(found[f"{layer}.weight"], expected)
    assert found.keys() == base.keys()
    assert {path.name for path in (tmp_path / "adapters").iterdir()} >= {PEFT_ADAPTERS, "adapter_config.json"}
    torch.testing.assert_close(logits_of(adapted), logits_of(merged), atol=1e-4, rtol=1e-4)
    adapted["model"].disable_adapters()
    assert (logits_of(adapted) - logits_of(merged)).abs().max() > 0.1, "the adapters change the answers"
    shutil.copy(lora.run / "config.yaml", tmp_path / "adapters" / EXPORTED_RECIPE)  # its base is not next to them
    assert main(["sample", "adapters", "--against", str(lora.run), "--limit", "6", "--out", "drawn"]) == 0
    assert answers(tmp_path / "drawn", "adapters") == answers(tmp_path / "drawn")


def test_a_run_and_its_export_give_the_same_answers(trained: Trained, tmp_path: Path, capsys: Capture) -> None:
    few = ("--limit", "3", "--seeds", "2")
    assert main(["sample", str(trained.run), "--against", "base", *few, "--out", "drawn"]) == 0
    assert main(["export", str(trained.run), "--out", "out"]) == 0
    assert main(["sample", "out", "--recipe", str(RECIPE), *few, "--out", "again"]) == 0
    found = rows(tmp_path / "drawn", LABEL)
    assert [row["sample_id"] for row in found] == ["000-0", "000-1", "001-0", "001-1", "002-0", "002-1"]
    assert answers(tmp_path / "again", "out") == answers(tmp_path / "drawn") != answers(tmp_path / "drawn", "base")
    assert all(Path(row["images"][0]).is_file() and row["tokens"] <= 4 for row in found)
    page = (tmp_path / "drawn" / "answers.txt").read_text().splitlines()
    assert page[:3] == [
        f"prompt 0: {found[0]['prompt']}",
        f"image: {found[0]['images'][0]}",
        f"target: {found[0]['target']}",
    ]
    cut = " (cut)" if found[1]["finish"] == "length" else ""
    assert f"{LABEL} 1{cut}: {found[1]['text']}" in page
    assert len([line for line in page if line.startswith((LABEL, "base"))]) == 12
    before = (tmp_path / "drawn" / LABEL / "samples.jsonl").stat()
    assert main(["sample", str(trained.run), "--against", "base", *few, "--out", "drawn"]) == 0
    after = (tmp_path / "drawn" / LABEL / "samples.jsonl").stat()
    assert before.st_size == after.st_size, "no answer is drawn twice"
    capsys.readouterr()
    assert main(["sample", str(trained.run), "--steps", "4"]) == 2
    assert "--steps: 'qwen_omni' draws tokens, without denoising steps" in capsys.readouterr().err
    assert main(["score", str(RECIPE), "drawn/base/samples.jsonl"]) == 0


def test_answers_are_compared_by_the_recipes_reward(trained: Trained, tmp_path: Path) -> None:
    command = ["eval", str(trained.run), "--limit", "4", "--seeds", "2", "--out", "compared"]
    assert main(command) == 0
    results = json.loads((tmp_path / "compared" / "results.json").read_text())
    scores = list(csv.DictReader((tmp_path / "compared" / "scores.csv").read_text().splitlines()))
    assert [one["model"] for one in results["models"]] == ["base", LABEL]
    for one in results["models"]:
        right = [row["text"].strip() == row["target"] for row in rows(tmp_path / "compared", one["model"])]
        assert one["failed"] == 0 and one["numbers"]["reward"]["mean"] == pytest.approx(sum(right) / 8)
        assert [float(row["reward"]) for row in scores if row["model"] == one["model"]] == right
    page = (tmp_path / "compared" / "answers.txt").read_text()
    assert page.count(" reward ") == 16
    drawn = (tmp_path / "compared" / "base" / "samples.jsonl").read_text()
    assert main(command) == 0
    assert (tmp_path / "compared" / "base" / "samples.jsonl").read_text() == drawn


def test_a_base_models_small_files_are_copied_and_its_weights_are_not(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    small = ("config.json", "chat_template.jinja", "spk_dict.pt", "LICENSE", "additional_chat_templates/tools.jinja")
    weights = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "old.pth")
    for name in (*small, *weights, "README.md", ".hidden"):
        (tmp_path / name).touch()
    assert {str(path) for path in BaseModel(tmp_path, ("thinker",), "transformers").files()} == {*small}
