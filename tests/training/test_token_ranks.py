"""Tests that ranks which share answers train what one rank trains, with images on one of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from omni_async.config.layout import ParallelLayout
from omni_async.config.schema import Config
from omni_async.training.engine import TrainEngine
from omni_async.training.groups import GroupBatch
from tests.support.token_world import ToySampling, ToyTokenPolicy, token_config, token_group, token_share
from tests.training import training_world as world

POLICY = ToyTokenPolicy()
SPEC = ToySampling(max_tokens=5)
SGD = {"trainer.optimizer.name": "sgd", "trainer.optimizer.lr": 0.1, "trainer.micro_batch_tokens": 12}
LORA = {"rank": 2, "alpha": 8.0, "target_modules": ["qkv", "out"]}
SETTINGS: dict[str, dict[str, Any]] = {
    "masked": {
        "algorithm.answers.mean": "token",
        "algorithm.answers.overlong": "mask",
        "algorithm.kl_coef": 0.1,
        "trainer.gradient_checkpointing": True,
    },
    "corrected": {
        "algorithm.correction.mode": "decoupled",
        "algorithm.correction.weights": "importance",
        "algorithm.correction.k1": [0.9, 1.1],
        "trainer.steps_per_update": 2,
        "trainer.groups_per_micro_batch": 2,
    },
    "adapters": {"model.lora": LORA, "algorithm.kl_coef": 0.1},
}


def config_of(name: str, workers: int) -> Config:
    changes = {"rollout.group_size": 3, "trainer.workers": workers, **SGD, **SETTINGS[name]}
    return token_config(SPEC, **changes)


def train(engine: TrainEngine, groups: list[GroupBatch], passes: bool) -> dict[str, Any]:
    """Makes an optimizer step on weights that have moved since the answers were drawn."""
    shares = [token_share(group, engine.layout, 3 * number) for number, group in enumerate(groups)]
    drifts = [engine.recompute_proximal(share) for share in shares] if passes else []
    for share in shares:
        engine.accumulate(share, 1 / sum(group.size for group in groups))
    metrics = engine.step()
    exported = world.export(engine, 1)
    return {
        "metrics": metrics,
        "weights": world.trainable(engine),
        "drifts": drifts,
        "digest0": engine.digest0,
        "published": None if exported is None else [one.name for one in exported[0].tensors],
    }


def work(rank: int, groups: list[GroupBatch]) -> dict[str, Any]:
    results = {}
    for name in SETTINGS:
        results[name] = train(world.started(config_of(name, 2), POLICY, rank), groups, name == "corrected")
    return results


def test_two_ranks_train_what_one_trains() -> None:
    config = config_of("masked", 1)
    drawing = POLICY.load_components(torch.float32)
    world.move(drawing["thinker"].parameters(), 0.05)
    groups = [token_group(POLICY, config, seed, 1, images=seed, components=drawing) for seed in (0, 1)]
    found = world.on_ranks(2, work, groups)
    for name in SETTINGS:
        expected = train(world.started(config_of(name, 1), POLICY), groups, name == "corrected")
        for rank in found:
            world.assert_close(rank[name]["weights"], expected["weights"], atol=1e-6)
        got, wanted = found[0][name]["metrics"], expected["metrics"]
        assert got.keys() == wanted.keys()
        for key in wanted.keys() - {"flops/sum"}:
            assert got[key] == pytest.approx(wanted[key], rel=1e-4, abs=2e-6), (name, key)
        assert found[0][name]["digest0"] == expected["digest0"]
        assert found[0][name]["published"] == expected["published"]
        for number, drifts in enumerate(expected["drifts"]):
            shares = [rank[name]["drifts"][number] for rank in found]
            for ours, theirs in zip(ParallelLayout(0, 2).in_order(shares, 3, 3 * number), drifts, strict=True):
                assert ours.log_ratio == pytest.approx(theirs.log_ratio, abs=1e-6)
