"""Tests that four ranks train what one trains in every layout, and that checkpoints fit every layout."""

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import DTensor

from omni_async.config.schema import Config
from omni_async.training.engine import TrainEngine
from omni_async.training.groups import GroupBatch
from omni_async.training.model import PlainBackend
from omni_async.types import SdeWindow
from omni_async.weights.buckets import unpack
from tests.pipelines.families import QWEN_IMAGE, SD3, STEPS, WAN, first_of
from tests.support.fakes import share
from tests.training import training_world as world
from tests.training.drawn import drawn

WORLD = 4
LORA = {"rank": 2, "alpha": 64.0, "target_modules": ["to_q", "to_v"]}
LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded": {"gradient_checkpointing": True},
    "hsdp": {"shard": 2, "gather": "step"},
    "offloaded": {"offload": True, "ema": {"every": 1}},
    "hsdp lora": {"shard": 2, "gather": "step", "offload": True, "gradient_checkpointing": True},
}


GUIDANCE: dict[str, dict[str, Any]] = {
    "qwen_image": {"true_cfg_scale": 2.0},
    "stable_diffusion_3": {"guidance_scale": 2.0, "max_sequence_length": 16},
    "wan2_2": {"num_frames": 5, "guidance_scale": 2.0, "max_sequence_length": 16},
    "z_image": {"guidance_scale": 1.0},
}
WINDOW = SdeWindow(1, 3)  # over both experts of Wan2.2


def config_of(family: Any, path: str, layout: str, **trainer: Any) -> Config:
    return world.make_config(
        **{"model.pipeline": family.name, "model.path": path, "lora": LORA if layout.endswith("lora") else None},
        **{"sampling": {"height": 32, "width": 32, **GUIDANCE[family.name]}, "rollout.num_inference_steps": STEPS},
        **{"sde": {"window": {"size": 2, "range": [0, 5]}}, "kl_coef": 0.1, "size": 2, "optimizer": "sgd"},
        **{f"trainer.{key}": value for key, value in trainer.items()},
    )


def train(engine: TrainEngine, group: GroupBatch, folder: Path) -> dict[str, Any]:
    """Makes an update; returns its gradients, metrics and weights. The checkpoint of it is in `folder`."""
    engine.accumulate(share(group, engine.layout), 1 / 8)
    its = world.gradients(engine)
    metrics = engine.step()
    world.save(engine, folder)
    return {"gradients": its, "metrics": metrics, "digest0": engine.digest0, **exported(engine)}


def exported(engine: TrainEngine) -> dict[str, Any]:
    found = world.export(engine, 1)
    weights = {} if found is None else {"weights": {n: t.clone() for n, t in unpack(*found)}, "digest": found[0].digest}
    return {"auxiliary": world.auxiliaries(engine), **weights}


def work(rank: int, folder: Path, jobs: dict[str, tuple[Config, GroupBatch, Path]]) -> dict[str, Any]:
    results = {}
    for name, (config, group, checkpoint) in jobs.items():
        engine = world.started(config, rank=rank)
        parameter = next(iter(engine._model.trainable.values()))
        assert isinstance(parameter, DTensor) and parameter.device_mesh.ndim == (2 if config.trainer.shard else 1)
        result = train(engine, group, folder / name)
        world.load(engine, checkpoint)
        results[name] = {**result, "resumed": exported(engine)}
    return results


def assert_same(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    """Bit for bit."""
    assert found["digest"] == expected["digest"], what
    world.assert_close(found["auxiliary"], expected["auxiliary"])


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_four_ranks_train_what_one_trains_in_every_layout(tmp_path):
    jobs: dict[str, tuple[Config, GroupBatch, Path]] = {}
    alone: dict[str, tuple[TrainEngine, dict[str, Any]]] = {}
    for family in (QWEN_IMAGE, SD3, WAN, first_of("z_image")):
        path = family.build(tmp_path / family.name)
        group = drawn(family.policy(path), config_of(family, path, ""), WINDOW)
        for layout, trainer in LAYOUTS.items():
            name = f"{family.name} {layout}"
            engine = world.started(config_of(family, path, layout, ema=trainer.get("ema")))
            assert isinstance(engine._model, PlainBackend)
            alone[name] = engine, train(engine, group, tmp_path / f"{name} alone")
            jobs[name] = config_of(family, path, layout, workers=WORLD, **trainer), group, tmp_path / f"{name} alone"
    results = world.on_ranks(WORLD, work, tmp_path, jobs)
    for name, (engine, expected) in alone.items():
        ranks = [found[name] for found in results]
        assert max(grad.abs().max().item() for grad in expected["gradients"].values()) > 3e-4
        for found in ranks:
            world.assert_close(found["gradients"], expected["gradients"], 3e-6)
            assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-4, abs=5e-5), name
            world.assert_close(found["auxiliary"], expected["auxiliary"], 3e-6)
        world.assert_close(ranks[0]["weights"], expected["weights"], 3e-6)
        assert ranks[0]["digest0"] == expected["digest0"], name

        # The lone rank's checkpoint goes on on four, theirs on one, to the bit.
        assert_same(ranks[0]["resumed"], expected, name)
        world.load(engine, tmp_path / name)
        assert_same(exported(engine), ranks[0], name)
