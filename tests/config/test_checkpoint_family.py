"""A recipe need not name the model family: the checkpoint does."""

import json
import sys
from pathlib import Path

import pytest

from omni_async.config import load
from omni_async.config.load import family_of
from omni_async.families import PipelineFamily, SamplingSpec, family_names


def checkpoint(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "model_index.json").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("pipeline", "family"),
    [
        ("QwenImagePipeline", "qwen_image"),
        ("StableDiffusion3Pipeline", "stable_diffusion_3"),
        ("WanPipeline", "wan2_2"),
    ],
)
def test_the_family_is_the_one_that_takes_the_checkpoint(tmp_path: Path, pipeline: str, family: str) -> None:
    folder = checkpoint(tmp_path / "model", json.dumps({"_class_name": pipeline}))
    (tmp_path / "recipe.yaml").write_text(
        "model: {path: model}\ndata: {prompts: p.txt}\nreward: {scorers: [{name: ocr}]}\n"
    )
    config = load(tmp_path / "recipe.yaml", ["rollout.sampling.height=32"])
    assert family_of(folder) == config.model.pipeline == family
    assert config.rollout.sampling.height == 32


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"_class_name": "UnheardPipeline"}', "model.path: .* is a UnheardPipeline checkpoint, and none of"),
        ('{"_class_name"', "names no pipeline class"),
        ("[]", "names no pipeline class"),
        ("{}", "names no pipeline class"),
    ],
)
def test_a_checkpoint_that_no_family_takes(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        family_of(checkpoint(tmp_path / "model", text))
    with pytest.raises(ValueError, match=r"it has no model_index\.json"):
        family_of(tmp_path)


def test_two_families_that_take_the_same_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> PipelineFamily:
        if name == family_names()[-1]:
            raise ValueError("model.pipeline: its package is broken")
        return PipelineFamily(name, policy="", model_index_class="TwicePipeline", sampling=SamplingSpec)

    monkeypatch.setattr(sys.modules["omni_async.config.load"], "find_family", find)
    with pytest.raises(ValueError, match=r"is a TwicePipeline checkpoint, and .* all take it: name one"):
        family_of(checkpoint(tmp_path / "model", '{"_class_name": "TwicePipeline"}'))
