"""Tests that a resumed engine is the engine that was saved, to the bit; nothing of a checkpoint is a pickle."""

import pytest
import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader

from omni_async.training import TrainingError
from omni_async.training.engine import TrainEngine
from tests.fakes import TinyPolicy, tiny_group
from tests.training.engines import make_config, started
from tests.training.exports import export
from tests.training.saved import load, save

CPU = torch.device("cpu")
LORA = {"rank": 2, "alpha": 4.0}


def update(engine: TrainEngine, seed: int) -> dict[str, float]:
    engine.accumulate(tiny_group(TinyPolicy(), engine.config, seed), 1 / 8)
    return engine.step()


@pytest.mark.parametrize("backend", ["plain", "fsdp2"])
@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("before", [0, 2])
def test_resuming_continues_bit_for_bit(tmp_path, backend, lora, optimizer, before):
    config = make_config(
        **{
            "trainer.backend": backend,
            "model.lora": lora,
            "trainer.optimizer.name": optimizer,
            "trainer.optimizer.momentum": 0.9,
            "trainer.optimizer.schedule": "cosine",
            "trainer.optimizer.warmup_steps": 1,
        }
    )
    engine = started(config)
    for seed in range(before):
        update(engine, seed)
    save(engine, tmp_path / "v2")
    expected = [update(engine, seed) for seed in (5, 6)]

    resumed = started(config)
    update(resumed, 9)  # whatever it did before, loading replaces it
    load(resumed, tmp_path / "v2")
    assert resumed.optimizer_steps == before
    assert [update(resumed, seed) for seed in (5, 6)] == expected
    assert export(resumed, 4)[0].digest == export(engine, 4)[0].digest


@pytest.mark.parametrize("backend", ["plain", "fsdp2"])
def test_what_is_trained_while_it_is_written_is_not_in_it(tmp_path, backend):
    engine = started(make_config(**{"trainer.backend": backend}))
    update(engine, 0)
    digest = export(engine, 1)[0].digest
    writing, state = engine.begin_save(tmp_path)
    for seed in range(1, 6):
        update(engine, seed)
    writing.result()
    resumed = started(engine.config)
    resumed.load(tmp_path, state)
    assert export(resumed, 1)[0].digest == digest != export(engine, 1)[0].digest


def test_a_lora_checkpoint_holds_adapters_only(tmp_path):
    save(started(make_config(**{"model.lora": LORA})), tmp_path / "c")
    stored = HuggingFaceStorageReader(str(tmp_path / "c" / "tensors")).read_metadata().state_dict_metadata
    assert stored
    assert all(".lora_" in name for name in stored)


def test_every_file_is_safetensors(tmp_path):
    engine = started(make_config())
    update(engine, 0)
    save(engine, tmp_path / "c")
    assert {path.suffix for path in (tmp_path / "c" / "tensors").iterdir()} == {".safetensors"}


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    save(started(make_config()), tmp_path / "full")
    with pytest.raises(TrainingError, match="is of another model, LoRA setting"):
        load(started(make_config(**{"model.lora": LORA})), tmp_path / "full")
    with pytest.raises(TrainingError, match="is not a checkpoint: it has no tensors"):
        started(make_config()).load(tmp_path, {})


def test_files_that_are_none_are_refused(tmp_path):
    save(started(make_config()), tmp_path / "c")
    for file in (tmp_path / "c" / "tensors").iterdir():
        file.write_bytes(b"not safetensors")
    with pytest.raises(TrainingError, match="cannot be read"):
        load(started(make_config()), tmp_path / "c")
