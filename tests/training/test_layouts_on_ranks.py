"""Tests that four gloo ranks train what one plain rank trains, however they hold the weights, for every family, and
that a checkpoint of one layout goes on in another."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from omni_async.config import with_spec
from omni_async.config.schema import Config
from omni_async.families import find_family
from omni_async.layout import ParallelLayout
from omni_async.policy import load_policy
from omni_async.training.engine import TrainEngine
from omni_async.training.groups import GroupBatch
from omni_async.training.model import PlainBackend
from omni_async.types import SdeWindow
from omni_async.weights.buckets import unpack
from omni_async.weights.shards import whole
from tests.configs import build
from tests.fakes import share
from tests.pipelines.families import FAMILIES, STEPS
from tests.training.drawn import drawn
from tests.training.training_world import export, load, on_ranks, save

CPU, WORLD = torch.device("cpu"), 4
LORA = {"rank": 2, "alpha": 64.0, "target_modules": ["to_q", "to_v"]}
LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded": {"gradient_checkpointing": True},
    "hsdp": {"shard": 2},
    "offloaded": {"offload": True, "ema": {"every": 1}},
    "hsdp lora": {"shard": 2, "offload": True, "gradient_checkpointing": True},
}


def make_config(family: Any, path: str, **trainer: Any) -> Config:
    raw = {
        "model": {"path": path, "pipeline": family.name},
        "rollout": {
            "group_size": 4,
            "num_inference_steps": STEPS,
            "sampling": {"height": 32, "width": 32, **GUIDANCE[family.name]},
            "sde": {"window": {"size": 2, "range": [0, 5]}},
        },
        "algorithm": {"clip_range": 0.2, "kl_coef": 0.1},
        "trainer": {"micro_batch_size": 2, "optimizer": {"name": "sgd", "lr": 1e-2, "max_grad_norm": None}, **trainer},
    }
    return with_spec(build(raw))


GUIDANCE: dict[str, dict[str, Any]] = {
    "qwen_image": {"true_cfg_scale": 2.0},
    "stable_diffusion_3": {"guidance_scale": 2.0, "max_sequence_length": 16},
    "wan2_2": {"num_frames": 5, "guidance_scale": 2.0, "max_sequence_length": 16},
}
WINDOW = SdeWindow(1, 3)  # over both experts of Wan2.2


def with_lora(config: Config, layout: str) -> Config:
    if not layout.endswith("lora"):
        return config
    raw = msgspec.to_builtins(config.model) | {"lora": LORA}
    return msgspec.structs.replace(config, model=msgspec.convert(raw, type(config.model)))


def start(config: Config, rank: int) -> TrainEngine:
    policy = load_policy(find_family(config.model.pipeline), config.model.path)
    engine = TrainEngine(config, policy, ParallelLayout.of(config.trainer, rank), device=CPU)
    engine.setup()
    return engine


def train(engine: TrainEngine, group: GroupBatch, folder: Path) -> dict[str, Any]:
    """Makes an update; returns its gradients, metrics and weights. The checkpoint of it is in `folder`."""
    engine.accumulate(share(group, engine.layout), 1 / 8)
    gradients = {n: whole(p.grad).clone() for n, p in engine._model.trainable.items() if p.grad is not None}
    metrics = engine.step()
    save(engine, folder)
    return {"gradients": gradients, "metrics": metrics, "digest0": engine.digest0, **exported(engine)}


def exported(engine: TrainEngine) -> dict[str, Any]:
    found = export(engine, 1)
    auxiliary = {name: whole(t).clone() for name, t in engine._model.auxiliary.tensors().items()}
    if found is None:
        return {"auxiliary": auxiliary}
    return {"weights": {n: t.clone() for n, t in unpack(*found)}, "digest": found[0].digest, "auxiliary": auxiliary}


def work(rank: int, folder: Path, jobs: dict[str, tuple[Config, GroupBatch, Path]]) -> dict[str, Any]:
    results = {}
    for name, (config, group, checkpoint) in jobs.items():
        engine = start(config, rank)
        parameter = next(iter(engine._model.trainable.values()))
        assert isinstance(parameter, DTensor) and parameter.device_mesh.ndim == (2 if config.trainer.shard else 1)
        result = train(engine, group, folder / name)
        load(engine, checkpoint)
        result["resumed"] = exported(engine)
        results[name] = result
    return results


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=3e-6, msg=f"{what}: {name}")


def assert_same(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    """Bit for bit."""
    assert found["digest"] == expected["digest"], what
    assert found["auxiliary"].keys() == expected["auxiliary"].keys()
    assert all(torch.equal(found["auxiliary"][name], t) for name, t in expected["auxiliary"].items()), what


@pytest.mark.timeout(900)
def test_four_ranks_train_what_one_trains_in_every_layout(tmp_path):
    jobs: dict[str, tuple[Config, GroupBatch, Path]] = {}
    alone: dict[str, tuple[TrainEngine, dict[str, Any]]] = {}
    for family in FAMILIES[:3]:
        path = family.build(tmp_path / family.name)
        group = drawn(family.policy(path), make_config(family, path), WINDOW)
        for layout, trainer in LAYOUTS.items():
            name = f"{family.name} {layout}"
            plain = with_lora(make_config(family, path, ema=trainer.get("ema")), layout)
            engine = start(plain, 0)
            assert isinstance(engine._model, PlainBackend)
            alone[name] = engine, train(engine, group, tmp_path / f"{name} alone")
            config = with_lora(make_config(family, path, workers=WORLD, **trainer), layout)
            jobs[name] = config, group, tmp_path / f"{name} alone"
    results = on_ranks(WORLD, tmp_path, work, tmp_path, jobs)
    for name, (engine, expected) in alone.items():
        ranks = [found[name] for found in results]
        for found in ranks:
            assert max(grad.abs().max().item() for grad in expected["gradients"].values()) > 3e-4
            assert_close(found["gradients"], expected["gradients"], name)
            assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-4, abs=5e-5)
            assert_close(found["auxiliary"], expected["auxiliary"], name)
        assert_close(ranks[0]["weights"], expected["weights"], name)
        assert ranks[0]["digest0"] == expected["digest0"]

        # The lone rank's checkpoint goes on on four, theirs on one, to the bit.
        assert_same(ranks[0]["resumed"], expected, name)
        load(engine, tmp_path / name)
        assert_same(exported(engine), ranks[0], name)
