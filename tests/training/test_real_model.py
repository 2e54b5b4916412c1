"""Tests the engine on a real architecture: a tiny random Qwen-Image, on the CPU and, where there is one, a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from omni_async.training.device import rank_device
from omni_async.training.engine import TrainEngine
from omni_async.training.groups import GroupBatch
from omni_async.types import SdeWindow
from omni_async.weights.buckets import as_tensor, unpack
from omni_async.weights.lora import merged_weights
from omni_async.weights.shards import whole
from tests.support.fakes import load_model
from tests.training import training_world as world
from tests.training.drawn import drawn_by_an_engine, random_group

tiny = pytest.importorskip("omni_async_pipelines.qwen_image.tiny")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("qwen"), layers=2)


def with_group(checkpoint: Path, device: str, **changes: Any) -> tuple[TrainEngine, GroupBatch]:
    """Returns an engine, and a group as its weights would have drawn it."""
    changes |= {"model.path": str(checkpoint), "sampling": {"height": 32, "width": 32}, "checkpointing": True}
    config = world.make_config(**changes)
    engine = world.started(config, device=world.CPU if device == "cpu" else rank_device(0))
    group = random_group(engine.policy, config)  # prompts of different lengths
    for sample, recorded in zip(group.trajectories, world.log_probs(engine, group), strict=True):
        sample["log_probs"] = recorded
    return engine, group


ACCELERATED = [pytest.param("accelerator", backend, marks=pytest.mark.gpu) for backend in ("plain", "auto")]


@world.loras
@pytest.mark.parametrize(("device", "backend"), [("cpu", "fsdp2"), *ACCELERATED])
def test_qwen_image_trains_in_bfloat16_and_exports_diffusers_names(checkpoint, lora, device, backend, tmp_path):
    payload = "full" if lora is None else "lora"
    changes = {"dtype": "bfloat16", "lora": lora, "payload": payload, "backend": backend, "kl_coef": 0.1}
    engine, group = with_group(checkpoint, device, **changes)
    world.step_on(engine, group)
    metrics = world.step_on(engine, group)
    assert metrics["ratio_deviation"] > 0 and metrics["kl_ref"] > 0
    manifest, _ = world.export(engine, 2)
    names = {spec.name for spec in manifest.tensors}
    if lora is None:
        assert names == set(dict(load_model(engine.policy).named_parameters()))
    else:
        assert "transformer.transformer_blocks.0.attn.to_q.lora_A.weight" in names
        assert len(names) == 2 * 4 * 2
    assert {spec.dtype for spec in manifest.tensors} == {"bfloat16" if lora is None else "float32"}
    world.save(engine, tmp_path / "c")
    world.load(engine, tmp_path / "c")
    assert world.export(engine, 2)[0].digest == manifest.digest


@pytest.mark.parametrize(
    ("device", "backend"), [pytest.param("cpu", "fsdp2", marks=pytest.mark.thorough), *ACCELERATED]
)
def test_in_float32_gradients_are_those_of_the_cpu(checkpoint, device, backend):
    def gradients_on(device: str, backend: str) -> dict[str, torch.Tensor]:
        engine, group = with_group(checkpoint, device, backend=backend, cfg=2.0)
        return {name: gradient.cpu() for name, gradient in world.trained(engine, group)[1].items()}

    world.assert_gradients(gradients_on(device, backend), gradients_on("cpu", "plain"), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("device", "backend"), [pytest.param("cpu", "fsdp2", marks=pytest.mark.thorough), *ACCELERATED]
)
@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("bfloat16", 1e-2)])
async def test_the_trainer_finds_the_log_probs_of_the_engine_on_its_device(checkpoint, device, backend, dtype, most):
    """`most`: of a difference per latent element; of bfloat16 it is the default of trainer.max_mismatch."""
    engine, _ = with_group(checkpoint, device, backend=backend, dtype=dtype, cfg=3.0)
    group = await drawn_by_an_engine(engine.policy, engine.config, engine.device, SdeWindow(1, 2))
    recorded = torch.stack([sample["log_probs"] for sample in group.trajectories])
    difference = (world.log_probs(engine, group) - recorded).abs()
    assert difference.max() < most


@pytest.mark.gpu
@world.loras
def test_an_accelerators_weights_are_copied_out_whole_into_pinned_memory(checkpoint, lora):
    changes = {"dtype": "bfloat16", "lora": lora, "payload": "full", "backend": "auto"}
    engine, group = with_group(checkpoint, "accelerator", **changes)
    world.step_on(engine, group)
    buckets = engine.bucket_set()
    snapshot = engine.snapshot(1, buckets)
    assert snapshot is not None
    assert all(as_tensor(bucket).is_pinned() for bucket in snapshot.buckets)
    copied = dict(unpack(snapshot.manifest(), snapshot.buckets))
    expected = merged_weights(engine._model.base(), engine._model.adapters(), 2.0, whole, whole)
    for name, weight in expected:
        assert torch.equal(copied[name], weight.detach().bfloat16().cpu()), name
