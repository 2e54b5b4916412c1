"""Tests what leaves the trainer: names, dtypes, merged adapters, digests."""

import numpy as np
import pytest
import torch

from omni_async.config.schema import Config
from omni_async.training.engine import TrainEngine
from omni_async.types import WeightManifest
from omni_async.weights.buckets import digest_tensors, unpack
from omni_async.weights.digest import verify
from omni_async.weights.lora import merged_weights
from tests.fakes import TinyPolicy, load_model, tiny_group
from tests.training.engines import log_probs, make_config, started
from tests.training.exports import export

CPU = torch.device("cpu")
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
    engine = trained(make_config(**{"model.dtype": dtype, "model.lora": lora}), updates=0)
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
    engine = trained(make_config(**{"model.lora": LORA, "trainer.backend": backend}))
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
    full = trained(make_config(**{"model.lora": LORA, "model.dtype": dtype}))
    light = trained(make_config(**{"model.lora": LORA, "model.dtype": dtype, "weights.payload": "lora"}))
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
    first, second = (trained(make_config(**{"model.lora": LORA}), updates=0) for _ in range(2))
    other = trained(make_config(**{"model.lora": LORA, "run.seed": 1}), updates=0)
    a, b, c = (torch.cat([p.detach().flatten() for p in e._model.trainable.values()]) for e in (first, second, other))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_impossible_lora_settings_name_their_key():
    with pytest.raises(ValueError, match=r"weights\.payload: lora needs model\.lora"):
        trained(make_config(**{"weights.payload": "lora"}))
    with pytest.raises(ValueError, match=r"model\.lora\.target_modules: .*nowhere"):
        trained(make_config(**{"model.lora": {"rank": 2, "alpha": 1.0, "target_modules": ["nowhere"]}}))


@pytest.mark.parametrize("backend", ["plain", "fsdp2"])
@pytest.mark.parametrize(("lora", "payload"), [(None, "full"), (LORA, "full"), (LORA, "lora")])
def test_snapshots_in_the_same_memory_are_the_weights_of_their_own_version(backend, lora, payload):
    engine = trained(
        make_config(
            **{"model.lora": lora, "model.dtype": "bfloat16", "trainer.backend": backend, "weights.payload": payload}
        )
    )
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
