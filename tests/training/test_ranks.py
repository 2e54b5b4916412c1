"""Tests that several gloo ranks train what one trains, whatever the split."""

import math
from pathlib import Path
from typing import Any

import pytest

from omni_async.config.layout import ParallelLayout
from omni_async.config.schema import Config
from omni_async.training.engine import TrainEngine
from omni_async.training.groups import GroupBatch
from omni_async.weights.buckets import unpack
from omni_async.weights.digest import verify
from tests.support.fakes import TinyPolicy, TwoExperts, load_model, share, tiny_group, tiny_pair
from tests.training import training_world as world

EXPERTS = "experts: "  # begins the names of variants with two components, over which windows reach

# A group of 5 is 3 + 2 samples on two ranks, so that the second rank has padding.
BASE = {"group_size": 5, "size": 2, "optimizer": "sgd"}
FORWARD = {"sde": None, "clip_range": None}
DISTILL = {"name": "distill", "clip_range": None, "teacher": {"path": "1"}}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {"kl_coef": 0.05},
    "lora": {"kl_coef": 0.05, "lora": world.LORA},
    "decoupled": {
        "steps_per_update": 2,
        "correction": {"mode": "decoupled", "weights": "importance", "normalise": True, "kappa_nats": 0.2},
    },
    "kept": {"correction": {"mode": "decoupled", "kappa_nats": 0.2}},
    "samples": {
        "name": "gspo",
        "size": 3,
        "correction": {"mode": "bypass", "k1": (math.exp(-0.9), math.exp(-0.4)), "reject_level": "sum"},
    },
    "kept steps": {
        "name": "gspo",
        "size": 3,
        "clip_range": (0.01, 0.02),
        "algorithm.clip_centre": "drift",
        "algorithm.dual_clip": 1.03,
        "correction": {"mode": "bypass", "k2": 0.1, "steps": "kept"},
    },
    "reinforce": {
        "name": "reinforce",
        "clip_range": None,
        "correction": {"mode": "bypass", "weights": "importance", "k2": 0.1},
    },
    "share of steps": {"fraction": 0.5, "cfg": 2.0, "unconditional_gradient": False},
    "nft": {**FORWARD, "name": "diffusion_nft", "kl_coef": 0.1, "fraction": 0.6},
    "nft lora": {**FORWARD, "name": "diffusion_nft", "kl_coef": 0.1, "lora": world.LORA},
    "awm": {
        **FORWARD,
        "name": "awm",
        "awm": {"ratio": "sum_first", "off_policy": True, "ema_coef": 0.5},
        "ema": {"every": 1},
    },
    "gathered once": {"kl_coef": 0.05, "trainer.gather": "step"},
    "whole lora": {"lora": world.LORA, "trainer.shard": 1},
    "fused": {"optimizer": "adamw", "trainer.optimizer.fused": True, "trainer.optimizer.eps": 1e-4},
    "drift": {"steps_per_update": 2, "trainer.optimizer.step_size": {"by": "drift", "target": 1e-3}},
    # A teacher's gradients point the same way, so that there is something to remove.
    "aligned": {
        **DISTILL,
        "optimizer": "adamw",
        "lr": 1e-4,
        "trainer.optimizer.eps": 1e-4,
        "trainer.optimizer.max_alignment": 0.1,
    },
    "aligned lora": {
        **DISTILL,
        "lora": world.LORA,
        "trainer.optimizer.momentum": 0.9,
        "trainer.optimizer.max_alignment": 0.1,
    },
    "distill": {**DISTILL, "kl_coef": 0.05},
    "teacher lora": {"teacher": {"path": "1"}, "lora": world.LORA},
    "dpo": {**FORWARD, "name": "diffusion_dpo", "dpo": {"beta": 2.0}, "forward": {"draws": 6}},
}
VARIANTS |= {EXPERTS + name: VARIANTS[name] for name in ("full", "lora", "share of steps", "nft")}
VARIANTS[EXPERTS + "samples"] = {"name": "gspo", "size": 3}


def start(variant: str, config: Config, rank: int = 0) -> TrainEngine:
    return world.started(config, TwoExperts() if variant.startswith(EXPERTS) else TinyPolicy(), rank)


def groups_of(engine: TrainEngine, seeds: range) -> list[GroupBatch]:
    """Returns this rank's samples of groups that weights a little beside the engine's have made."""
    policy, config = engine.policy, engine.config
    if config.algorithm.name == "diffusion_dpo":
        return [tiny_pair(policy, config, seed) for seed in seeds]
    made_by = load_model(policy)
    world.move(made_by.parameters(), 0.05)
    groups = [tiny_group(policy, config, seed, staleness=1, model=made_by) for seed in seeds]
    return [share(group, engine.layout, start=i * group.size) for i, group in enumerate(groups)]


def update(engine: TrainEngine, number: int) -> list[dict[str, float]]:
    """Makes an update; returns its metrics."""
    steps = engine.config.trainer.steps_per_update
    groups = groups_of(engine, range(number * steps, (number + 1) * steps))
    if steps > 1:
        for group in groups:
            engine.recompute_proximal(group)
    metrics = []
    for group in groups:
        engine.accumulate(group, 1 / 10)
        metrics.append(engine.step(grad_scale=2.0))
    return metrics


def run(engine: TrainEngine, folder: Path) -> dict[str, Any]:
    """Runs two updates, a checkpoint between them, an export after them."""
    first = update(engine, 0)
    world.save(engine, folder / "checkpoint")
    second = update(engine, 1)
    out = world.export(engine, 2)
    assert (out is None) == (engine.layout.rank > 0)
    if out is not None:
        verify(*out)
    return {"updates": first + second, "export": out, "auxiliary": world.auxiliaries(engine), "digest0": engine.digest0}


def run_all(rank: int, folder: Path, configs: dict[str, Config]) -> dict[str, Any]:
    return {name: run(start(name, config, rank), folder / name) for name, config in configs.items()}


def test_two_ranks_train_what_one_trains(tmp_path, some_of):
    variants = dict(some_of("variants on two ranks", [*VARIANTS.items()], 5))
    two = {name: world.make_config(**{**BASE, **change, "workers": 2}) for name, change in variants.items()}
    found = world.on_ranks(2, run_all, tmp_path, two)
    for name, change in variants.items():
        engine = start(name, world.make_config(**{**BASE, **change}))
        alone = run(engine, tmp_path / f"{name}-alone")
        ranks = [results[name] for results in found]

        for rank in ranks:
            for metrics, of_one in zip(rank["updates"], alone["updates"], strict=True):
                assert metrics == pytest.approx(of_one, rel=1e-4, abs=1e-6), name
        if "correction" in str(change):
            assert 0 < alone["updates"][0]["masked"] < 1
        if "step_size" in str(change):
            assert 0 < alone["updates"][0]["lr_factor"] < 1
        if "alignment" in str(change):
            assert alone["updates"][1]["alignment"] > 0.1
        weights = dict(unpack(*alone["export"]))
        world.assert_close(dict(unpack(*ranks[0]["export"])), weights, atol=1e-6)
        for rank in ranks:
            world.assert_close(rank["auxiliary"], alone["auxiliary"], atol=1e-6)
        assert ranks[0]["digest0"] == alone["digest0"]

        # A checkpoint of two ranks continues on one, and is read by whoever does not train.
        world.load(engine, tmp_path / name / "checkpoint")
        world.assert_close(world.read_trained(tmp_path / name / "checkpoint", "trained"), world.trainable(engine))
        update(engine, 1)
        world.assert_close(dict(unpack(*world.export(engine, 2))), weights, atol=1e-6)


DEALT = [name for name in VARIANTS if "lora" not in name]
# On three ranks: fewer samples (and draws of a pair) than ranks, and 2 + 1 + 1 of them.
SIZES = (2, 4)


def sized(name: str, size: int) -> dict[str, Any]:
    change = {**BASE, **VARIANTS[name], "group_size": size, "trainer.groups_per_update": 4}
    return {**change, "forward": {"draws": size}} if name == "dpo" else change


def two_groups(engine: TrainEngine) -> dict[str, Any]:
    """Returns gradients and metrics of one step on two groups, and what is known of this rank's samples before."""
    groups = groups_of(engine, range(2))
    seen: list[list[Any]] = []
    if engine.config.rollout.sde is not None:
        seen += [world.log_probs(engine, group).tolist() for group in groups]
    if engine.config.trainer.steps_per_update > 1:
        drifts = [engine.recompute_proximal(group) for group in groups]
        seen += [[(*drift.log_ratio, *(drift.kappa or ())) for drift in its] for its in drifts]
    for group in groups:
        engine.accumulate(group, 1 / 10)
    return {"seen": seen, "gradients": world.gradients(engine), "metrics": engine.step()}


def deal_all(rank: int, configs: dict[tuple[str, int], Config]) -> dict[tuple[str, int], Any]:
    return {key: two_groups(start(key[0], config, rank)) for key, config in configs.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("count", [2, 3])
def test_shares_of_any_size_have_the_gradients_of_one_rank(count):
    jobs = {(name, size): sized(name, size) for name in DEALT for size in SIZES if count == 3 or size > 2}
    dealt = {key: world.make_config(**{**change, "workers": count}) for key, change in jobs.items()}
    ranks = world.on_ranks(count, deal_all, dealt)
    for key, change in jobs.items():
        expected = two_groups(start(key[0], world.make_config(**change)))
        largest = max(gradient.abs().max().item() for gradient in expected["gradients"].values())
        assert largest > 1e-4, key
        for number, found in enumerate(rank[key] for rank in ranks):
            world.assert_close(found["gradients"], expected["gradients"], rtol=3e-6, atol=3e-6 * largest)
            assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-6), key
            for i, (mine, rows) in enumerate(zip(found["seen"], expected["seen"], strict=True)):
                dealt = ParallelLayout(number, count).dealt(len(rows), i % 2 * len(rows))
                assert mine == [pytest.approx(rows[k], abs=1e-5) for k in dealt], key
