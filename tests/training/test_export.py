"""Tests exported weights and checkpoints: names, dtypes, merged adapters, digests and resuming to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader

from omni_async.config.schema import Lora
from omni_async.training import TrainingError
from omni_async.training.auxiliary import add_adapters
from omni_async.training.engine import TrainEngine
from omni_async.weights.buckets import digest_tensors, unpack
from omni_async.weights.digest import verify
from omni_async.weights.lora import merged_weights
from tests.support.fakes import TinyPolicy, load_model
from tests.training import training_world as world

LORA = {"rank": 2, "alpha": 8.0, "target_modules": ["to_q", "to_out.0"]}
LAYERS = [f"transformer.transformer_blocks.{i}.attn.{layer}" for i in (0, 1) for layer in ("to_q", "to_out.0")]


def exported(engine: TrainEngine, version: int = 1) -> dict[str, torch.Tensor]:
    manifest, buckets = world.export(engine, version)
    verify(manifest, buckets)
    assert manifest.version == version
    return dict(unpack(manifest, buckets))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, LORA])
def test_version_zero_is_what_an_engine_loads(dtype, lora):
    engine = world.engine(dtype=dtype, lora=lora)
    loaded = dict(load_model(TinyPolicy(), getattr(torch, dtype)).named_parameters())
    assert exported(engine, 0).keys() == loaded.keys()
    assert engine.digest0 == world.export(engine, 0)[0].digest == digest_tensors(loaded.items())


def test_a_trained_model_loaded_from_its_export_is_the_trained_model():
    engine, other = world.updated(), world.engine()
    assert world.export(engine, 1)[0].digest != engine.digest0
    other._model.components.load_state_dict(exported(engine))
    assert torch.equal(world.log_probs(other, world.group_of(engine)), world.log_probs(engine, world.group_of(engine)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merging_a_lora_payload_gives_the_full_payload_bit_for_bit(dtype):
    full, light = (world.updated(lora=LORA, dtype=dtype, payload=payload) for payload in ("full", "lora"))
    manifest, adapters = world.export(light, 5)[0], exported(light, 5)
    assert adapters.keys() == {f"{layer}.lora_{half}.weight" for layer in LAYERS for half in "AB"}
    assert manifest.lora == LORA
    base = dict(load_model(TinyPolicy(), getattr(torch, dtype)).requires_grad_(False).named_parameters())
    assert digest_tensors(merged_weights(base, adapters, 4.0)) == world.export(full, 5)[0].digest


def test_adapters_start_alike_for_one_seed_alone():
    a, b, c = (world.weights(world.engine(**{"lora": LORA, "run.seed": seed})) for seed in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_impossible_lora_settings_name_their_key():
    with pytest.raises(ValueError, match=r"weights\.payload: lora needs model\.lora"):
        world.engine(payload="lora")
    for targets in (["nowhere"], ["to_q", "nowhere"]):
        with pytest.raises(ValueError, match=r"model\.lora\.target_modules: .*nowhere"):
            world.engine(lora={"rank": 2, "alpha": 1.0, "target_modules": targets})
    half = nn.ModuleDict({"transformer": nn.ModuleDict({"to_q": nn.Linear(2, 2)}), "transformer_2": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match=r"no layer of transformer_2 is called as one of \['to_q'\]"):
        add_adapters(half, Lora(rank=2, target_modules=("to_q",)), seed=0)


@world.backends
@pytest.mark.parametrize(("lora", "payload"), [(None, "full"), (LORA, "full"), (LORA, "lora")])
def test_snapshots_in_the_same_memory_are_the_weights_of_their_own_version(backend, lora, payload):
    engine = world.updated(lora=lora, dtype="bfloat16", backend=backend, payload=payload)
    buckets, digests = engine.bucket_set(), set()
    for version in (1, 2):
        snapshot = engine.snapshot(version, buckets)
        manifest, own = world.export(engine, version)
        assert snapshot.manifest() == manifest
        assert [bucket.tobytes() for bucket in snapshot.buckets] == [bucket.tobytes() for bucket in own]
        digests.add(manifest.digest)
        world.update(engine, 10 + version)
    assert len(digests) == 2


@pytest.mark.sliced(floor=4)
@world.backends
@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize(
    "others", [{}, {**world.NFT, "kl_coef": 0.1, "ema": {"every": 2}}], ids=["alone", "beside others"]
)
@pytest.mark.parametrize(("optimizer", "before"), [("adamw", 0), ("adamw", 3), ("sgd", 3)])
def test_resuming_continues_bit_for_bit(tmp_path, backend, lora, others, optimizer, before):
    rate = {
        "name": optimizer,
        "lr": 1e-2,
        "momentum": 0.9,
        "schedule": "cosine",
        "warmup_steps": 1,
        "max_alignment": 0.1,
    }
    engine = world.updated(before, **{"backend": backend, "lora": lora, "trainer.optimizer": rate, **others})
    world.save(engine, tmp_path / "c")
    expected = [world.update(engine, seed) for seed in (5, 6)]

    resumed = world.started(engine.config)
    world.update(resumed, 9)  # whatever it did before, loading replaces it
    world.load(resumed, tmp_path / "c")
    assert resumed.optimizer_steps == before
    assert [world.update(resumed, seed) for seed in (5, 6)] == expected
    world.assert_close(world.auxiliaries(resumed), world.auxiliaries(engine))
    assert world.export(resumed, 4)[0].digest == world.export(engine, 4)[0].digest


@world.backends
def test_what_is_trained_while_it_is_written_is_not_in_it(tmp_path, backend):
    engine = world.updated(1, backend=backend)
    digest = world.export(engine, 1)[0].digest
    writing, state = engine.begin_save(tmp_path)
    for seed in range(1, 6):
        world.update(engine, seed)
    writing.result()
    resumed = world.started(engine.config)
    resumed.load(tmp_path, state)
    assert world.export(resumed, 1)[0].digest == digest != world.export(engine, 1)[0].digest


def test_files_are_safetensors_and_under_lora_of_adapters_only(tmp_path):
    world.save(world.updated(1, lora=LORA), tmp_path / "c")
    stored = HuggingFaceStorageReader(str(tmp_path / "c" / "tensors")).read_metadata().state_dict_metadata
    assert stored and all(".lora_" in name for name in stored)
    assert {path.suffix for path in (tmp_path / "c" / "tensors").iterdir()} == {".safetensors"}


def test_files_that_are_none_are_refused(tmp_path):
    engine = world.engine()
    with pytest.raises(TrainingError, match="is not a checkpoint: it has no tensors"):
        engine.load(tmp_path, {})
    world.save(engine, tmp_path / "c")
    for file in (tmp_path / "c" / "tensors").iterdir():
        file.write_bytes(b"not safetensors")
    with pytest.raises(TrainingError, match="cannot be read"):
        world.load(engine, tmp_path / "c")
