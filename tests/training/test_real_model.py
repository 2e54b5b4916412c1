"""Tests the engine on a real architecture: a tiny random Qwen-Image, on the CPU and, where there is one, a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from omni_async.training.device import rank_device
from omni_async.training.engine import TrainEngine
from omni_async.weights.buckets import digest_tensors
from tests.fakes import load_model
from tests.training.drawn import random_group
from tests.training.training_world import (
    CPU,
    NFT,
    auxiliary_of,
    backends,
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
    sampling = {"height": 32, "width": 32, **changes.pop("sampling", {})}
    config = make_config(**{"model.path": str(checkpoint), "sampling": sampling, "checkpointing": True, **changes})
    engine = started(config, device=device)
    group = random_group(engine.policy, config)  # prompts of different lengths
    if config.rollout.sde is not None:
        for sample, recorded in zip(group.trajectories, log_probs(engine, group), strict=True):
            sample["log_probs"] = recorded
    step_on(engine, group)
    return engine, step_on(engine, group)


@backends
@loras
def test_qwen_image_trains_and_exports_diffusers_names(checkpoint, lora, backend):
    payload = "full" if lora is None else "lora"
    engine, metrics = train_two_steps(checkpoint, CPU, lora=lora, backend=backend, payload=payload)
    assert metrics["ratio_deviation"] > 0
    names = {spec.name for spec in export(engine, 1)[0].tensors}
    if lora is None:
        assert names == set(dict(load_model(engine.policy).named_parameters()))
    else:
        assert "transformer.transformer_blocks.0.attn.to_q.lora_A.weight" in names
        assert len(names) == 2 * 4 * 2


@backends
def test_qwen_image_trains_on_final_latents_beside_two_other_policies(checkpoint, backend):
    changes = {**NFT, "kl_coef": 0.1, "unconditional_gradient": False, "sampling": {"true_cfg_scale": 3.0}}
    engine, metrics = train_two_steps(checkpoint, CPU, backend=backend, **changes)
    assert metrics["kl_ref"] > 1.5 * metrics["old_deviation"] > 0  # the old policy follows, the reference does not
    digests = {which: digest_tensors(auxiliary_of(engine, which).items()) for which in ("old", "reference")}
    assert digests["reference"] == engine.digest0
    assert digests["old"] == export(engine, 2)[0].digest != engine.digest0


@pytest.mark.gpu
@loras
@pytest.mark.parametrize("backend", ["plain", "auto"])
def test_qwen_image_trains_in_bfloat16_on_an_accelerator(checkpoint, lora, backend, tmp_path):
    changes = {"dtype": "bfloat16", "lora": lora, "backend": backend, "kl_coef": 0.1}
    engine, metrics = train_two_steps(checkpoint, rank_device(0), **changes)
    assert metrics["ratio_deviation"] > 0
    assert metrics["kl_ref"] > 0
    manifest, _ = export(engine, 2)
    assert {spec.dtype for spec in manifest.tensors} == {"bfloat16"}
    save(engine, tmp_path / "c")
    load(engine, tmp_path / "c")
    assert export(engine, 2)[0].digest == manifest.digest
