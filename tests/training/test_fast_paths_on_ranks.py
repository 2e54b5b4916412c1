"""Tests on two gloo ranks how often they exchange weights, and that faster ways train the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from omni_async.config.schema import Config
from omni_async.training.engine import TrainEngine
from tests.support.fakes import share
from tests.training import training_world as world

GUIDED = {"cfg": 2.0, "size": 2, "group_size": 3}
FULL = {**GUIDED, "kl_coef": 0.1, "dtype": "bfloat16"}
SHARED = {**GUIDED, "size": 6, "optimizer": "sgd"}
CLIPPED = {**GUIDED, "lr": 1e-3, "trainer.optimizer.max_grad_norm": 0.01}
JOBS: dict[str, dict[str, Any]] = {
    "full": FULL,
    "full, gathered once": {**FULL, "trainer.gather": "step"},
    "lora": {**GUIDED, "lora": world.LORA},
    "lora, gathered once": {**GUIDED, "lora": world.LORA, "trainer.gather": "step"},
    "lora, whole": {**GUIDED, "lora": world.LORA, "trainer.shard": 1},
    "shared": {**SHARED, "trainer.groups_per_micro_batch": 2},
    "clipped": CLIPPED,
    "clipped, fused": {**CLIPPED, "trainer.optimizer.fused": True},
}
# A layer of the fake model has two passes forward, one per branch of the guidance, and two backward. The root's weights
# are gathered once per micro-batch where the layers' are, and the frozen root's once per step.


class Collectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(op)] += 1
        return op(*args, **(kwargs or {}))

    @property
    def gathers(self) -> int:
        return self.found["c10d._allgather_base_.default"]


def update(engine: TrainEngine, number: int) -> tuple[dict[str, float], int]:
    """Makes an update of two groups; returns its metrics, and how often weights were gathered for its gradients."""
    with Collectives() as collectives:
        for i, seed in enumerate((2 * number, 2 * number + 1)):
            engine.accumulate(share(world.group_of(engine, seed), engine.layout, start=3 * i), 1 / 12)
        engine._accumulate_waiting()
    return engine.step(), collectives.gathers


def run(engine: TrainEngine, folder: Path) -> dict[str, Any]:
    """Makes two updates; with a fused optimizer the second one again from a checkpoint, too."""
    first, fused = update(engine, 0), engine.config.trainer.optimizer.fused
    if fused:
        world.save(engine, folder)
    found = {"updates": [first, update(engine, 1)], "weights": world.trainable(engine)}
    if fused:
        world.load(engine, folder)
        update(engine, 1)
        world.assert_close(world.trainable(engine), found["weights"])
    return {**found, "exports": world.export(engine, 2) is not None}


def run_all(rank: int, folder: Path, configs: dict[str, Config]) -> dict[str, Any]:
    return {name: run(world.started(config, rank=rank), folder / name) for name, config in configs.items()}


@pytest.mark.thorough
def test_two_ranks_exchange_less_and_train_the_same(tmp_path):
    configs = {name: world.make_config(workers=2, **changes) for name, changes in JOBS.items()}
    found = world.on_ranks(2, run_all, tmp_path, configs)
    ranks = {name: [results[name] for results in found] for name in JOBS}
    for name, (rank, other) in ranks.items():
        world.assert_close(other["weights"], rank["weights"])
        assert (rank["exports"], other["exports"]) == (True, False), name

    def gathers(name: str) -> list[int]:
        return [count for _, count in ranks[name][0]["updates"]]

    def metrics(name: str) -> list[dict[str, float]]:
        return [its for its, _ in ranks[name][0]["updates"]]

    assert {name: gathers(name) for name in JOBS if "clipped" not in name} == {
        "full": [56, 56],
        "full, gathered once": [24, 24],
        "lora": [32, 32],
        "lora, gathered once": [3, 3],
        "lora, whole": [0, 0],
        "shared": [9, 9],
    }
    for name in ("full", "lora"):
        assert metrics(f"{name}, gathered once") == metrics(name)
        world.assert_close(ranks[f"{name}, gathered once"][0]["weights"], ranks[name][0]["weights"])
    for other, same in (("lora, whole", "lora"), ("clipped, fused", "clipped")):
        for its, expected in zip(metrics(other), metrics(same), strict=True):
            assert its == pytest.approx(expected, rel=1e-5, abs=1e-7)
        world.assert_close(ranks[other][0]["weights"], ranks[same][0]["weights"], atol=2e-6)
    apart = run(world.started(world.make_config(**SHARED)), tmp_path / "alone")
    for its, (expected, _) in zip(metrics("shared"), apart["updates"], strict=True):
        assert its == pytest.approx(expected, rel=1e-4, abs=1e-6)
    world.assert_close(ranks["shared"][0]["weights"], apart["weights"], atol=1e-6)
