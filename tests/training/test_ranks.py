"""Two ranks are one rank: same metrics, same weights, whatever the split. Real processes over gloo."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from omni_async.config.schema import Config
from omni_async.training.device import init_process_group
from omni_async.training.engine import TrainEngine
from omni_async.weights.buckets import unpack, verify
from tests.fakes import TinyPolicy, share, tiny_group

CPU = torch.device("cpu")
MakeConfig = Callable[..., Config]


def run(engine: TrainEngine, folder: Path) -> dict[str, Any]:
    """Two updates, a checkpoint between them, an export after them; a group of 5 is 3 + 2 samples on two ranks."""
    engine.setup()
    rank, world = engine.rank, engine.world_size
    metrics = []
    for seed in (0, 1):
        group = tiny_group(TinyPolicy(), engine.config, seed)
        mine = share(group, rank, world)
        log_probs = engine.log_probs(mine)
        engine.accumulate(mine, 1 / 10)
        metrics.append(engine.step(grad_scale=2.0))
        if seed == 0:
            engine.save(folder / "checkpoint", {"version": 1})
    out = engine.export(2)
    assert (out is None) == (rank > 0)
    if out is not None:
        verify(*out)
    return {"metrics": metrics, "log_probs": log_probs, "export": out, "digest0": engine.digest0}


def worker(rank: int, world: int, folder: Path, configs: dict[str, Config]) -> None:
    torch.set_num_threads(1)
    init_process_group(rank, world, f"file://{folder}/rendezvous", timeout=60.0, device=CPU)
    for name, config in configs.items():
        result = run(TrainEngine(config, TinyPolicy(), rank, world, device=CPU), folder / name)
        (folder / name / f"rank{rank}.pkl").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()


def test_two_ranks_train_what_one_trains(make_config: MakeConfig, tmp_path: Path) -> None:
    base = {"rollout.group_size": 5, "trainer.micro_batch_size": 2, "algorithm.kl_coef": 0.05, "trainer.optimizer.name": "sgd"}
    changes = {"full": {}, "lora": {"model.lora": {"rank": 2, "alpha": 4.0}}}
    one = {name: make_config(**base, **change) for name, change in changes.items()}
    two = {name: make_config(**base, **change, **{"trainer.workers": 2}) for name, change in changes.items()}
    mp.spawn(worker, (2, tmp_path, two), nprocs=2, join=True)
    for name, config in one.items():
        alone_engine = TrainEngine(config, TinyPolicy(), rank=0, world_size=1, device=CPU)
        alone = run(alone_engine, tmp_path / f"{name}-alone")
        ranks = [pickle.loads((tmp_path / name / f"rank{rank}.pkl").read_bytes()) for rank in (0, 1)]

        for rank in ranks:
            for got, expected in zip(rank["metrics"], alone["metrics"], strict=True):
                assert got == pytest.approx(expected, rel=1e-4, abs=1e-6)
        dealt = torch.empty_like(alone["log_probs"])
        dealt[0::2], dealt[1::2] = ranks[0]["log_probs"], ranks[1]["log_probs"]
        torch.testing.assert_close(dealt, alone["log_probs"], rtol=0, atol=1e-6)
        expected_weights = dict(unpack(*alone["export"]))
        for tensor_name, tensor in unpack(*ranks[0]["export"]):
            torch.testing.assert_close(tensor, expected_weights[tensor_name], rtol=0, atol=1e-6)
        assert ranks[0]["digest0"] == alone["digest0"]

        # A checkpoint of two ranks continues on one.
        assert alone_engine.load(tmp_path / name / "checkpoint") == {"version": 1}
        group = tiny_group(TinyPolicy(), config, 1)
        alone_engine.accumulate(group, 1 / 10)
        alone_engine.step(grad_scale=2.0)
        for tensor_name, tensor in unpack(*alone_engine.export(2)):
            torch.testing.assert_close(tensor, expected_weights[tensor_name], rtol=0, atol=1e-6)
