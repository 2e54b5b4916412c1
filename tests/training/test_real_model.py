"""Tests the engine on a real architecture: a tiny random Qwen-Image, on the CPU and, where there is one, a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from omni_async.training.device import rank_device
from omni_async.training.engine import TrainEngine
from tests.fakes import load_model
from tests.training.drawn import random_group
from tests.training.training_world import (
    CPU,
    export,
    load,
    log_probs,
    loras,
    make_config,
    save,
    started,
    step_on,
)

tiny = pytest.importorskip("pipelines.qwen_image.tiny")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("qwen"), layers=2)


def train_two_steps(checkpoint: Path, device: torch.device, **changes: Any) -> tuple[TrainEngine, dict[str, float]]:
    changes |= {"model.path": str(checkpoint), "sampling": {"height": 32, "width": 32}, "checkpointing": True}
    config = make_config(**changes)
    engine = started(config, device=device)
    group = random_group(engine.policy, config)  # prompts of different lengths
    for sample, recorded in zip(group.trajectories, log_probs(engine, group), strict=True):
        sample["log_probs"] = recorded
    step_on(engine, group)
    return engine, step_on(engine, group)


ACCELERATED = [pytest.param("accelerator", backend, marks=pytest.mark.gpu) for backend in ("plain", "auto")]


@loras
@pytest.mark.parametrize(("device", "backend"), [("cpu", "fsdp2"), *ACCELERATED])
def test_qwen_image_trains_in_bfloat16_and_exports_diffusers_names(checkpoint, lora, device, backend, tmp_path):
    payload = "full" if lora is None else "lora"
    changes = {"dtype": "bfloat16", "lora": lora, "payload": payload, "backend": backend, "kl_coef": 0.1}
    engine, metrics = train_two_steps(checkpoint, CPU if device == "cpu" else rank_device(0), **changes)
    assert metrics["ratio_deviation"] > 0 and metrics["kl_ref"] > 0
    manifest, _ = export(engine, 2)
    names = {spec.name for spec in manifest.tensors}
    if lora is None:
        assert names == set(dict(load_model(engine.policy).named_parameters()))
    else:
        assert "transformer.transformer_blocks.0.attn.to_q.lora_A.weight" in names
        assert len(names) == 2 * 4 * 2
    assert {spec.dtype for spec in manifest.tensors} == {"bfloat16" if lora is None else "float32"}
    save(engine, tmp_path / "c")
    load(engine, tmp_path / "c")
    assert export(engine, 2)[0].digest == manifest.digest
