"""Tests model folders, weights of `disk`, prompts' images and scorers' answers from elsewhere: used, or refused."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from omni_async.config import ConfigError
from omni_async.data.image_files import image_size, prompt_image, read_prompt_image
from omni_async.plugins.families import find_family
from omni_async.rewards import wire
from omni_async.rewards.base import ScoreError, require_scores
from omni_async.runtime.preflight.model_files import check_checkpoint
from omni_async.types import Prompt, Score
from omni_async.weights.buckets import unpack
from omni_async.weights.digest import WeightError, verify
from omni_async.weights.transport.disk import VersionFile, read_version
from tests.fuzz.damage import damages_of
from tests.fuzz.foreign import altered, changed, of, plain, refusal_or_nothing
from tests.support.examples import few
from tests.support.recorded_runs import build_model
from tests.weights.conftest import make_packed

Damaged = Callable[[Path, random.Random], None]


def damaged(path: Path, rng: random.Random) -> None:
    """Damages a file in one of the ways that fit its kind, except for the damages that take seconds to write."""
    possible = [one for one in damages_of(path) if one.__name__ not in ("long_line", "many_lines", "crowded", "huge")]
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, IndexError):
        rng.choice(possible)(path, rng)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "outside").mkdir()
    return build_model(folder / "whole")


@few(60)
@given(seed=st.integers(0, 2**32))
def test_model_folders(model, seed):
    rng, spoilt = random.Random(seed), model.with_name("spoilt")
    shutil.rmtree(spoilt, ignore_errors=True)
    shutil.copytree(model, spoilt)
    damaged(rng.choice(sorted(path for path in spoilt.rglob("*") if path.is_file())), rng)
    with refusal_or_nothing(model):
        check_checkpoint(spoilt, find_family("qwen_image"), {})


@pytest.mark.parametrize("name", ["a" * 300, "a/" * 3000 + "b" * 300])
def test_a_part_of_a_model_whose_name_no_folder_can_have(tmp_path, name):
    index = {"_class_name": "QwenImagePipeline", "transformer": ["diffusers", "X"], name: ["diffusers", "X"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"^model\.path: "):
        check_checkpoint(tmp_path, find_family("qwen_image"), {})


@few(60)
@given(seed=st.integers(0, 2**32))
def test_images_that_prompts_carry(tmp_path, seed):
    rng, file = random.Random(seed), tmp_path / "image.png"
    (tmp_path / "outside").mkdir(exist_ok=True)
    for left in (path for path in tmp_path.iterdir() if path.name != "outside"):
        shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
    Image.new("RGB", (8, 8), "red").save(file)
    damaged(file, rng)
    with refusal_or_nothing(tmp_path / "outside"):
        found = prompt_image(file, "prompts.txt:1")
        assert min(image_size(found)) > 0 and read_prompt_image(found).image.shape[0] == 3


@few(60)
@given(data=st.data())
def test_weights_by_disk(tmp_path, data):
    manifest, buckets = make_packed()
    path = tmp_path / "version.safetensors"
    file = VersionFile(path, manifest)
    file.open()
    for bucket in buckets:
        file.write(bucket)
    file.seal()
    path.write_bytes(data.draw(changed(path.read_bytes()) | st.binary(max_size=40)))
    with contextlib.suppress(WeightError):
        read = read_version(path, manifest)
        verify(*read)
        assert len(dict(unpack(*read))) == len(manifest.tensors)


@few(80)
@given(data=st.data(), form=st.sampled_from([wire.JSON, wire.MSGPACK]))
def test_answers_of_reward_servers(data, form):
    sent = wire.encode(wire.Answer(1, tuple(data.draw(st.lists(of(wire.Outcome), max_size=3)))), form)
    others = st.binary(max_size=60)
    if form == wire.JSON:
        tree = {"version": 1, "scores": [{"value": 1.0, "parts": {"a": 1.0}, "text": "x"}]}
        others |= altered(tree).map(msgspec.json.encode)
    with contextlib.suppress(wire.WireError):
        body = data.draw(changed(sent) | others)
        answer = wire.decode_answer(body, form)
        scores: list[Any] = [Score(one.value, one.parts, one.text) for one in answer.scores if one.value is not None]
        check_scores(scores, len(scores))


@few(80)
@given(value=plain, parts=plain, text=plain, values=st.lists(plain, max_size=2).map(tuple), answer=plain)
def test_answers_of_scorers(value, parts, text, values, answer):
    for scores in (answer, [answer], [Score(value, parts, text, values)], [Score(0.5, {"a": value}, None, values)]):
        check_scores(scores, 1)


def check_scores(scores: Any, count: int) -> None:
    """Requires of any answer that it is refused in one line, or can be written to every file and shown."""
    try:
        found = require_scores("judge", scores, [Prompt(0, "a")] * count)
    except ScoreError as error:
        assert len(str(error)) < 3000 and "\n" not in str(error)
    else:
        for one in found:
            assert msgspec.json.decode(msgspec.json.encode(one), type=Score) == one
