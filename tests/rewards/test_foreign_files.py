"""Tests that files of models which scorers read are plain ones and hold what a model could have written."""

from __future__ import annotations

import os

import numpy as np
import pytest

from omni_async.config import ConfigError
from omni_async.config.load import read_model_json
from omni_async.records.write.images import image_grid
from omni_async.rewards.scorers.head import read_tensors
from omni_async.rewards.scorers.hps_v3 import read_question
from omni_async.rewards.scorers.pretrained import wrong_checkpoint
from omni_async.training.loading import open_tensors


def test_models_of_scorers_and_their_questions_are_plain_files(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    assert "it is a named pipe" in (wrong_checkpoint(str(tmp_path), "clip") or "")
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text("[" * 5000)
    assert "names no model_type" in (wrong_checkpoint(str(tmp_path), "clip") or "")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="it is a device, not a file"):
        read_question(str(tmp_path / "zero"))
    with pytest.raises(OSError, match="it is a device, not a file"):
        read_tensors(str(tmp_path / "zero"))


@pytest.mark.parametrize(
    "content", [b"[" * 5000, b'{"a": NaN}', b'{"n": [' + b"0," * 1_000_001 + b"0]}", b"\xff", b"[]"]
)
def test_json_of_a_model_folder_is_an_object_of_bounded_size(content, tmp_path):
    (tmp_path / "model_index.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model_index\.json[^\n]+$"):
        read_model_json(tmp_path / "model_index.json")


@pytest.mark.parametrize("where", ['{"a": "../x.safetensors"}', '{"a": 1}', "3"])
def test_an_index_of_weights_lists_files_of_its_folder(where, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {where}}}')
    with pytest.raises(ValueError, match="expected a weight_map from tensors to files"):
        open_tensors(tmp_path)


def test_a_column_of_pixels_is_not_enlarged_to_a_billion():
    grid = image_grid([(np.zeros((100_000, 1, 3), np.uint8), "x"), (np.zeros((4, 4, 3), np.uint8), "y")])
    assert max(grid.size) < 1000
