"""Tests the engine on a real architecture: a tiny random Qwen-Image, on the CPU and, where there is one, a GPU."""

from pathlib import Path

import pytest
import torch

from omni_async.config.schema import Config
from omni_async.layout import ParallelLayout
from omni_async.training.device import rank_device
from omni_async.training.engine import TrainEngine
from omni_async.training.groups import GroupBatch
from omni_async.weights.buckets import digest_tensors
from tests.fakes import load_model
from tests.training.drawn import random_group
from tests.training.training_world import auxiliary_of, export, load, log_probs, make_config, save

tiny = pytest.importorskip("pipelines.qwen_image.tiny")
qwen = pytest.importorskip("pipelines.qwen_image.policy")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build(tmp_path_factory.mktemp("qwen"), layers=2)


def recorded_group(engine: TrainEngine) -> GroupBatch:
    """Makes samples of prompts of different lengths, whose log-probs are the engine's own."""
    group = random_group(engine.policy, engine.config)
    if engine.config.rollout.sde is not None:
        for sample, recorded in zip(group.trajectories, log_probs(engine, group), strict=True):
            sample["log_probs"] = recorded
    return group


def train_two_steps(config: Config, checkpoint: Path, device: torch.device) -> tuple[TrainEngine, dict[str, float]]:
    engine = TrainEngine(config, qwen.QwenImagePolicy(str(checkpoint)), ParallelLayout(), device=device)
    engine.setup()
    group = recorded_group(engine)
    for _ in range(2):
        engine.accumulate(group, 1 / 8)
        metrics = engine.step()
    return engine, metrics


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8.0}])
@pytest.mark.parametrize("backend", ["plain", "fsdp2"])
def test_qwen_image_trains_and_exports_diffusers_names(checkpoint, lora, backend):
    options = {"lora": lora, "backend": backend, "sampling": {"height": 32, "width": 32}}
    config = make_config(**options, checkpointing=True, payload="full" if lora is None else "lora")
    engine, metrics = train_two_steps(config, checkpoint, torch.device("cpu"))
    assert metrics["ratio_deviation"] > 0
    names = {spec.name for spec in export(engine, 1)[0].tensors}
    if lora is None:
        assert names == set(dict(load_model(qwen.QwenImagePolicy(str(checkpoint))).named_parameters()))
    else:
        assert "transformer.transformer_blocks.0.attn.to_q.lora_A.weight" in names
        assert len(names) == 2 * 4 * 2


@pytest.mark.parametrize("backend", ["plain", "fsdp2"])
def test_qwen_image_trains_on_final_latents_beside_two_other_policies(checkpoint, backend):
    options = {"backend": backend, "sampling": {"height": 32, "width": 32, "true_cfg_scale": 3.0}, "sde": None}
    nft = {"name": "diffusion_nft", "kl_coef": 0.1, "unconditional_gradient": False}
    engine, metrics = train_two_steps(
        make_config(**options, **nft, checkpointing=True), checkpoint, torch.device("cpu")
    )
    assert metrics["kl_ref"] > 1.5 * metrics["old_deviation"] > 0  # the old policy follows, the reference does not
    digests = {which: digest_tensors(auxiliary_of(engine, which).items()) for which in ("old", "reference")}
    assert digests["reference"] == engine.digest0
    assert digests["old"] == export(engine, 2)[0].digest != engine.digest0


@pytest.mark.gpu
@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8.0}])
@pytest.mark.parametrize("backend", ["plain", "auto"])
def test_qwen_image_trains_in_bfloat16_on_an_accelerator(checkpoint, lora, backend, tmp_path):
    options = {"dtype": "bfloat16", "lora": lora, "backend": backend, "kl_coef": 0.1}
    config = make_config(**options, sampling={"height": 32, "width": 32}, checkpointing=True)
    engine, metrics = train_two_steps(config, checkpoint, rank_device(0))
    assert metrics["ratio_deviation"] > 0
    assert metrics["kl_ref"] > 0
    manifest, _ = export(engine, 2)
    assert {spec.dtype for spec in manifest.tensors} == {"bfloat16"}
    save(engine, tmp_path / "c")
    load(engine, tmp_path / "c")
    assert export(engine, 2)[0].digest == manifest.digest
