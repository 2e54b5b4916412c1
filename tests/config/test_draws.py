"""Tests that recipes and commands fit what the model draws, latents or tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from omni_async.algorithms.checks import problems
from omni_async.checkpoint.contents import another_part, model_contents
from omni_async.cli import main
from omni_async.config import Config, ConfigError, load
from omni_async.config.load import family_of
from omni_async.runtime.preflight.check import preflight
from omni_async.runtime.preflight.devices import check_shares
from omni_async.runtime.preflight.model_files import check_checkpoint, check_sequence, check_teacher
from tests.support.token_family import FAMILY, AnswerSampling, one_tensor, token_family, write_answers

SPECS = {"rollout.sampling": AnswerSampling()}


@pytest.fixture(autouse=True)
def _family(tmp_path: Path) -> Iterator[None]:
    with token_family(tmp_path / "site"):
        yield


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    write_answers(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 + 1", "target": "2"}\n')
    sections: dict[str, Any] = {
        "model": {"path": "model"},
        "run": {"dir": str(tmp_path / "runs"), "runtime": "inprocess"},
        "data": {"prompts": "prompts.jsonl"},
        "rollout": {"engine": "transformers", "sde": None, "sampling": {"max_tokens": 5}},
        "reward": {"scorers": [{"name": "http", "params": {"urls": ["http://127.0.0.1:1"]}}]},
        "algorithm": {"name": "token_grpo"},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(sections))
    return tmp_path / "recipe.yaml"


def said(recipe: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        preflight(load(recipe, overrides))
    return str(caught.value)


def test_a_recipe_of_tokens_is_accepted_and_finds_its_family(recipe: Path) -> None:
    config = load(recipe, ["weights.kv=recompute", "model.lora={rank: 4, alpha: 4, target_modules: [q_proj]}"])
    assert (config.model.pipeline, config.rollout.sampling) == ("answers", AnswerSampling(max_tokens=5))
    inputs = preflight(config)
    assert inputs.family == FAMILY and inputs.contents["model.path/."]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.engine=diffusers", "rollout.engine: diffusers draws latents, and model.pipeline 'answers' draws tok"),
        ("rollout.engine=emulated", "rollout.engine: emulated draws latents"),
        ("rollout.batching=request", "weights.swap: 'step'"),
        ("rollout.share_initial_noise=true", "rollout.share_initial_noise: tokens are not made of noise; remove it"),
        ("rollout.share_prefix=true", "rollout.share_prefix: tokens are not made of noise; remove it"),
        ("rollout.offload=true", "rollout.offload: a model that draws tokens has no text encoders; remove it"),
        ("rollout.buckets=[{sampling: {max_tokens: 4}}]", "rollout.buckets: answers have no size"),
        ("rollout={engine: vllm}|placement.rollout.gpus=0.5", "rollout.engine_args: vllm takes 0.9 of the memory"),
        ("rollout={engine: vllm, engine_args: {stream_interval: 8}}", "engine_args.stream_interval: the run sets it"),
        (
            "rollout={engine: vllm, engine_args: {tensor_parallel_size: 2}}",
            "engine_args.tensor_parallel_size: the run sets it; use placement.rollout.gpus",
        ),
        ("rollout.sde={kind: flow}", "rollout.sde: token_grpo trains the tokens of answers"),
        ("emulation.profile=qwen_image_lora_h800", "qwen_image_lora_h800 has no times of tokens"),
        ("algorithm.name=flow_grpo", "algorithm.name: flow_grpo trains "),
        ("reward.scorers=[{name: ocr}]", "accepts image or video, but the samples are text"),
        ("trainer.sequence_parallel=2", "trainer.sequence_parallel: "),
    ],
)
def test_what_does_not_fit_tokens_is_one_line(recipe: Path, override: str, expected: str) -> None:
    message = said(recipe, "model.pipeline=answers", *override.split("|"))
    assert expected in message and "\n" not in message


def test_only_an_engine_of_vllm_with_its_own_devices_has_several(recipe: Path) -> None:
    vllm = "rollout={engine: vllm, engine_args: {gpu_memory_utilization: 0.3}}"
    check_shares(load(recipe, ["run.runtime=ray", vllm, "placement.rollout.gpus=2"]))
    for other in (
        ["run.runtime=inprocess", vllm],
        ["run.runtime=ray", "rollout={engine: transformers}"],
        ["run.runtime=ray", vllm, "placement.colocated=true", "staleness.max_updates=0"],
    ):
        with pytest.raises(ConfigError, match=r"rollout\.gpus: an engine uses one .*; raise rollout\.workers instead"):
            check_shares(load(recipe, [*other, "placement.rollout.gpus=2"]))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.engine=transformers", "rollout.engine: transformers draws tokens, and model.pipeline 'qwen_image'"),
        ("weights.kv=recompute", "weights.kv: a model that draws latents keeps no keys and values"),
    ],
)
def test_what_does_not_fit_latents_is_one_line(recipe: Path, override: str, expected: str) -> None:
    latents = ("model.pipeline=qwen_image", "rollout={engine: diffusers}", "algorithm.name=flow_grpo")
    with pytest.raises(ConfigError, match=expected):
        load(recipe, [*latents, override])
    token = load(recipe, [*latents[:2], "rollout.sde=null"])
    assert next(problems(token)) == (
        "algorithm.name: token_grpo trains the tokens of answers, and qwen_image draws latents; use an objective on"
        " latents, such as flow_grpo"
    )


def test_an_emulated_job_without_a_family_draws_what_its_engine_draws(recipe: Path) -> None:
    emulated = "emulation.profile=qwen_image_lora_h800"
    assert "qwen_image_lora_h800 has no times of tokens" in said(recipe, emulated)
    answers = "emulation.profile=qwen3_omni_thinker"
    assert "model.pipeline: required to emulate answers" in said(recipe, answers)
    assert "'nowhere' is not installed" in said(recipe, answers, "model.pipeline=nowhere")
    config: Config = load(recipe, [emulated, "rollout.engine=diffusers"])
    assert "token_grpo trains the tokens of answers, and an emulated model draws latents" in next(problems(config))


# ---- the checkpoint --------------------------------------------------------------------------------------------------


def test_a_folder_of_another_layout_names_both_layouts(tmp_path: Path) -> None:
    for content in ("{}", '{"architectures": []}', '{"architectures": [1]}', '{"_class_name": "AutoencoderKL"}'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=r"no model_index\.json \(diffusers .*config\.json that names architec"):
            family_of(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["Unheard"]}')
    with pytest.raises(ValueError, match="is a Unheard checkpoint, and none of the installed families takes it"):
        family_of(tmp_path)
    write_answers(tmp_path)
    assert family_of(tmp_path) == "answers"
    (tmp_path / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    assert family_of(tmp_path) == "qwen_image", "pipelines may have a config.json, too"


def _shards(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")


def _indexed(model: Path) -> None:
    _shards(model)
    index = {"weight_map": {"thinker.w": "model-00001-of-00001.safetensors", "thinker.v": "model-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda model: (model / "config.json").unlink(), "is not a checkpoint folder"),
        (lambda model: (model / "tokenizer.json").unlink(), "has no vocabulary; expected tokenizer.json"),
        (lambda model: (model / "tokenizer.json").write_text(""), "tokenizer.json is empty"),
        (lambda model: (model / "model.safetensors").unlink(), "has no weights (model.safetensors"),
        (lambda model: (model / "model.safetensors").write_bytes(one_tensor()[:-1]), "expected from its header"),
        (_shards, "1 shards without an index"),
        (_indexed, "lacks 1 of 2 files of weights: model-00002.safetensors"),
        (lambda model: (model / "config.json").write_text('{"architectures": ["Else"]}'), "is a Else checkpoint, but"),
    ],
)
def test_a_checkpoint_that_is_not_whole(tmp_path: Path, spoil: Any, expected: str) -> None:
    model = write_answers(tmp_path / "model")
    check_checkpoint(model, FAMILY, SPECS)
    spoil(model)
    with pytest.raises(ConfigError) as caught:
        check_checkpoint(model, FAMILY, SPECS)
    message = str(caught.value)
    assert expected in message and message.startswith("model.path: ") and "\n" not in message


def test_teachers_and_shared_sequences_are_of_latents(tmp_path: Path) -> None:
    model = write_answers(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"^algorithm\.teacher\.path: a 'answers' model has no teacher"):
        check_teacher(model, model, FAMILY, SPECS)
    check_sequence(1, model, FAMILY, SPECS)
    with pytest.raises(ConfigError, match=r"^trainer\.sequence_parallel: ranks cannot share the tokens of a 'answers'"):
        check_sequence(2, model, FAMILY, SPECS)


def test_a_checkpoints_content_is_compared_whatever_files_hold_it(tmp_path: Path) -> None:
    one, other = write_answers(tmp_path / "one"), write_answers(tmp_path / "other")
    (other / "README.md").write_text("a card")
    (other / "model.safetensors").rename(other / "model-00001-of-00001.safetensors")
    assert another_part(model_contents(one), model_contents(other)) is None
    (other / "model-00001-of-00001.safetensors").write_bytes(one_tensor("thinker.v"))
    assert another_part(model_contents(one), model_contents(other)) == "."


# ---- commands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ("check", "RECIPE", "--device", "80"),
        ("simulate", "RECIPE", "--profile", "qwen_image_lora_h800"),
        ("simulate", "RECIPE", "--profile", "qwen_image_lora_h800", "--what-if"),
        ("tune", "RECIPE", "--profile", "qwen_image_lora_h800", "--devices", "4"),
    ],
    ids=" ".join,
)
def test_commands_for_latents_refuse_tokens_in_one_line(
    recipe: Path, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(recipe) if word == "RECIPE" else word for word in command]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("omni-async: ") and "tokens" in err
