"""Tests that files are compared by content alone."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

from omni_async.checkpoint.contents import another_part, contents_of, model_contents
from omni_async.config import Config
from omni_async.config.rollout import Program
from omni_async.data.prompts import load_prompts
from tests.runtime.runtime_world import write_checkpoint, write_world

_LARGE = 3_000_000  # values of a tensor that is not read as a whole


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of one part with two tensors, of which one is large."""
    folder = tmp_path / "model"
    (folder / "transformer").mkdir(parents=True)
    (folder / "model_index.json").write_text('{"_class_name": "P", "transformer": ["diffusers", "D"]}')
    (folder / "transformer" / "config.json").write_text('{"layers": 1, "_name_or_path": "/home/me"}')
    tensors = {"small": np.arange(6, dtype=np.float32), "large": np.arange(_LARGE, dtype=np.float32)}
    save_file(tensors, folder / "transformer" / "diffusion_pytorch_model.safetensors")
    return folder


def changed_part(before: dict[str, str], folder: Path) -> str | None:
    return another_part(before, model_contents(folder))


def test_a_copy_elsewhere_is_the_same_and_so_is_one_in_other_files(model, tmp_path):
    stated = model_contents(model)
    copy = shutil.copytree(model, tmp_path / "elsewhere")
    part = copy / "transformer"
    tensors = load_file(part / "diffusion_pytorch_model.safetensors")
    (part / "diffusion_pytorch_model.safetensors").unlink()
    for number, name in enumerate(sorted(tensors), start=1):
        save_file({name: tensors[name]}, part / f"diffusion_pytorch_model-0000{number}-of-00002.safetensors")
    (part / "diffusion_pytorch_model.safetensors.index.json").write_text("{}")
    (part / "config.json").write_text('{"_name_or_path": "a hub", "_diffusers_version": "9", "layers": 1}')
    (copy / "README.md").write_text("a card")
    (copy / "whole.safetensors").write_bytes(b"no part of it")
    (part / ".DS_Store").write_bytes(b"x")
    (part / "diffusion_pytorch_model.fp16.safetensors").write_bytes(b"another variant")
    (part / "diffusion_pytorch_model.bin").write_bytes(b"a pickle")
    assert model_contents(copy) == stated
    linked = tmp_path / "linked"
    linked.symlink_to(model)
    assert model_contents(linked) == stated


@pytest.mark.parametrize(("tensor", "index"), [("small", 3), ("large", 0), ("large", _LARGE // 2), ("large", -1)])
def test_one_value_is_another_model(model, tensor, index):
    stated, file = model_contents(model), model / "transformer" / "diffusion_pytorch_model.safetensors"
    before, tensors = file.stat(), load_file(file)
    tensors[tensor][index] += 1
    save_file(tensors, file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    assert changed_part(stated, model) == "transformer"


def test_a_name_a_dtype_a_shape_a_setting_or_a_part_is_another_model(model):
    stated, file = model_contents(model), model / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors, whole = load_file(file), file.read_bytes()
    for others in (
        {"other": tensors["small"], "large": tensors["large"]},
        {**tensors, "small": tensors["small"].view(np.int32)},
        {**tensors, "small": tensors["small"].reshape(2, 3)},
    ):
        save_file(others, file)
        assert changed_part(stated, model) == "transformer"
    file.write_bytes(whole)
    config = model / "transformer" / "config.json"
    for text, part in (
        ('{"layers": 2}', "transformer"),
        ('{"name": "\\ud800", "size": 1e999}', "transformer"),  # no JSON to write
        ('{"layers": 1}', None),
    ):
        config.write_text(text)
        assert changed_part(stated, model) == part
    (model / "scheduler").mkdir()
    (model / "scheduler" / "scheduler_config.json").write_text('{"shift": 3}')
    (model / "model_index.json").write_text(
        '{"_class_name": "P", "transformer": ["diffusers", "D"], "scheduler": ["diffusers", "S"]}'
    )
    assert changed_part(stated, model) == "model_index.json"


def of(config: Config) -> dict[str, str]:
    prompts = load_prompts(str(config.data.prompts), "data.prompts", 100)
    return contents_of(config, prompts, ())


def test_prompts_are_stated_by_content(tmp_path):
    """A foreign scorer interprets its own parameters: `/` may be a separator, and a folder an output."""
    own = tmp_path / "own"
    own.mkdir()
    params = {"sep": "/", "long": "/" + "x" * 5000, "odd": "/a\0b", "own": str(own)}
    config = write_world(tmp_path, reward={"scorers": [{"name": "tests.of:Mine", "params": params}]})
    stated = of(config)
    assert {"data.prompts", "model.path/transformer"} <= stated.keys()
    assert not any(key.startswith("reward.scorers") for key in stated)
    (tmp_path / "prompts.txt").write_text("a dog\na cat\n")
    assert of(config)["data.prompts"] != stated["data.prompts"], "their order counts"
    (tmp_path / "prompts.txt").write_text("a cat\n\na dog")
    assert of(config) == stated, "what a line ends with does not"


@pytest.mark.parametrize("offsets", [[0, 4, 8], [0, 10**30], [8, 0], [-9, 4], "ab"])
def test_a_damaged_header_is_read_as_bytes(model, offsets):
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}).encode()
    damaged = model / "transformer" / "diffusion_pytorch_model.safetensors"
    before = model_contents(model)
    damaged.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert changed_part(before, model) == "transformer"


def test_files_of_scorers_and_of_a_program_are_stated_by_content(tmp_path):
    head, words = tmp_path / "head.pt", tmp_path / "words.txt"
    head.write_bytes(b"one")
    words.write_bytes(b"one")
    judge = {"name": "tests.of:Mine", "params": {"head": str(head)}}
    program = Program(name="refine", settings={"judge": judge, "lists": [{"words": str(words)}], "edit": "{prompt}"})
    config = write_world(tmp_path, reward={"scorers": [judge]})
    config = replace(config, rollout=replace(config.rollout, program=program))
    stated, settings = of(config), "rollout.program.settings"
    for file, keys in (
        (head, {"reward.scorers.0.params.head", f"{settings}.judge.params.head"}),
        (words, {f"{settings}.lists.0.words"}),
    ):
        file.write_bytes(b"two")
        assert {key for key, value in of(config).items() if value != stated[key]} == keys
        file.write_bytes(b"one")


def test_a_teacher_counts_by_content(tmp_path):
    config = write_world(tmp_path, algorithm={"name": "distill", "teacher": {"path": "teacher"}})
    prompts = load_prompts(str(tmp_path / "prompts.txt"), "data.prompts", 100)

    def of(change: str) -> str:
        write_checkpoint(tmp_path / "teacher")
        (tmp_path / "teacher" / "transformer" / "config.json").write_text(change)
        return contents_of(config, prompts, ())["algorithm.teacher.path"]

    first, copied, other = of('{"layers": 1}'), of('{"layers": 1, "_name_or_path": "x"}'), of('{"layers": 2}')
    assert first == copied != other
