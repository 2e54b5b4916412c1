"""Tests what leaves the trainer and comes back: names, dtypes, merged adapters, digests; a resumed engine is the engine
that was saved, to the bit, and nothing of a checkpoint is a pickle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader

from omni_async.config.schema import Config
from omni_async.training import TrainingError
from omni_async.training.engine import TrainEngine
from omni_async.types import WeightManifest
from omni_async.weights.buckets import digest_tensors, unpack
from omni_async.weights.digest import verify
from omni_async.weights.lora import merged_weights
from tests.fakes import TinyPolicy, load_model, tiny_group
from tests.training.training_world import export, load, log_probs, make_config, save, started

LORA = {"rank": 2, "alpha": 8.0, "target_modules": ["to_q", "to_out.0"]}


def trained(config: Config, updates: int = 2) -> TrainEngine:
    engine = started(config)
    for seed in range(updates):
        engine.accumulate(tiny_group(TinyPolicy(), config, seed), 1 / 8)
        engine.step()
    return engine


def exported(engine: TrainEngine, version: int = 1) -> dict[str, torch.Tensor]:
    manifest, buckets = export(engine, version)
    verify(manifest, buckets)
    assert manifest.version == version
    return dict(unpack(manifest, buckets))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, LORA])
def test_version_zero_is_what_an_engine_loads(dtype, lora):
    engine = trained(make_config(dtype=dtype, lora=lora), updates=0)
    loaded = load_model(TinyPolicy(), getattr(torch, dtype))
    manifest, buckets = export(engine, 0)
    assert dict(unpack(manifest, buckets)).keys() == dict(loaded.named_parameters()).keys()
    assert engine.digest0 == manifest.digest == digest_tensors(loaded.named_parameters())


def test_a_trained_model_loaded_from_its_export_is_the_trained_model():
    engine = trained(make_config())
    group = tiny_group(TinyPolicy(), engine.config)
    other = trained(make_config(), updates=0)
    assert export(engine, 1)[0].digest != engine.digest0
    other._model.components.load_state_dict(exported(engine))
    assert torch.equal(log_probs(other, group), log_probs(engine, group))


@pytest.mark.parametrize("backend", ["plain", "fsdp2"])
def test_lora_trains_adapters_only_and_a_full_payload_has_them_merged(backend):
    engine = trained(make_config(lora=LORA, backend=backend))
    assert all(".lora_" in name for name in engine._model.trainable)
    initial = dict(load_model(TinyPolicy()).named_parameters())
    merged = exported(engine)
    changed = {name for name in initial if not torch.equal(merged[name], initial[name])}
    assert changed == {
        f"transformer.transformer_blocks.{i}.attn.{layer}.weight" for i in (0, 1) for layer in ("to_q", "to_out.0")
    }
    plain = load_model(TinyPolicy())
    plain.load_state_dict(merged)
    reference = trained(make_config(), updates=0)
    reference._model.components.load_state_dict(merged)
    group = tiny_group(TinyPolicy(), engine.config)
    torch.testing.assert_close(log_probs(reference, group), log_probs(engine, group), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merging_a_lora_payload_gives_the_full_payload_bit_for_bit(dtype):
    full = trained(make_config(lora=LORA, dtype=dtype))
    light = trained(make_config(lora=LORA, dtype=dtype, payload="lora"))
    manifest, buckets = export(light, 5)
    adapters = dict(unpack(manifest, buckets))
    assert set(adapters) == {
        f"transformer.transformer_blocks.{i}.attn.{layer}.lora_{half}.weight"
        for i in (0, 1)
        for layer in ("to_q", "to_out.0")
        for half in "AB"
    }
    assert manifest.lora == {"rank": 2, "alpha": 8.0, "target_modules": ["to_q", "to_out.0"]}
    base = dict(load_model(TinyPolicy(), getattr(torch, dtype)).named_parameters())
    merged = {
        name: p.detach() for name, p in merged_weights(base, adapters, manifest.lora["alpha"] / manifest.lora["rank"])
    }
    assert digest_tensors(merged.items()) == export(full, 5)[0].digest


def test_adapters_start_alike_for_one_seed_and_the_model_starts_unchanged():
    first, second = (trained(make_config(lora=LORA), updates=0) for _ in range(2))
    other = trained(make_config(**{"lora": LORA, "run.seed": 1}), updates=0)
    a, b, c = (torch.cat([p.detach().flatten() for p in e._model.trainable.values()]) for e in (first, second, other))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_impossible_lora_settings_name_their_key():
    with pytest.raises(ValueError, match=r"weights\.payload: lora needs model\.lora"):
        trained(make_config(payload="lora"))
    with pytest.raises(ValueError, match=r"model\.lora\.target_modules: .*nowhere"):
        trained(make_config(lora={"rank": 2, "alpha": 1.0, "target_modules": ["nowhere"]}))


@pytest.mark.parametrize("backend", ["plain", "fsdp2"])
@pytest.mark.parametrize(("lora", "payload"), [(None, "full"), (LORA, "full"), (LORA, "lora")])
def test_snapshots_in_the_same_memory_are_the_weights_of_their_own_version(backend, lora, payload):
    engine = trained(make_config(lora=lora, dtype="bfloat16", backend=backend, payload=payload))
    buckets = engine.bucket_set()
    digests = []
    for version in (1, 2):
        snapshot = engine.snapshot(version, buckets)
        manifest = snapshot.manifest()
        assert (manifest, [bucket.tobytes() for bucket in snapshot.buckets]) == _as_bytes(export(engine, version))
        digests.append(manifest.digest)
        engine.accumulate(tiny_group(TinyPolicy(), engine.config, 10 + version), 1 / 8)
        engine.step()
    assert digests[0] != digests[1]


def _as_bytes(exported: tuple[WeightManifest, list[np.ndarray]]) -> tuple[WeightManifest, list[bytes]]:
    return exported[0], [bucket.tobytes() for bucket in exported[1]]


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
            "backend": backend,
            "lora": lora,
            "optimizer": optimizer,
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
    engine = started(make_config(backend=backend))
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
    save(started(make_config(lora=LORA)), tmp_path / "c")
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
        load(started(make_config(lora=LORA)), tmp_path / "full")
    with pytest.raises(TrainingError, match="is not a checkpoint: it has no tensors"):
        started(make_config()).load(tmp_path, {})


def test_files_that_are_none_are_refused(tmp_path):
    save(started(make_config()), tmp_path / "c")
    for file in (tmp_path / "c" / "tensors").iterdir():
        file.write_bytes(b"not safetensors")
    with pytest.raises(TrainingError, match="cannot be read"):
        load(started(make_config()), tmp_path / "c")
