"""Tests how a backend is chosen, that another package can bring one, and what is refused."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from omni_async.config.schema import Config
from omni_async.plugins.backends import find_backend
from omni_async.training.engine import TrainEngine
from omni_async.training.model import compile_layers, repeated_layers
from omni_async.weights.buckets import unpack
from tests.support.fakes import TinyPolicy, TinyTransformer, share
from tests.training.training_world import assert_close, export, group_of, make_config, on_ranks, started, update


@pytest.fixture
def package(install: Callable[[str], Path]) -> Path:
    return install(
        "[omni_async.backends]\nsumming = tests.training.outside:BACKEND\nbroken = tests.training.outside:nothing\n"
    )


def test_auto_is_plain_on_one_cpu_rank_alone():
    def auto(workers: int, on_cpu: bool) -> str:
        return find_backend("auto", workers=workers, offload=False, on_cpu=on_cpu).name

    assert [auto(1, True), auto(2, True), auto(1, False)] == ["plain", "fsdp2", "fsdp2"]


def test_what_a_backend_cannot_do_is_refused(package):
    for name, workers, offload, message in (
        ("summing", 2, True, r"^trainer\.offload: the backend 'summing' does not offload weights; use"),
        ("other", 1, False, r"^trainer\.backend: expected one of \['broken', .*'summing'\] or 'auto', got 'other'$"),
        ("broken", 1, False, r"^trainer\.backend: 'broken' is registered as .* cannot be imported: AttributeError"),
        ("plain", 2, False, r"^trainer\.backend: 'plain' is one rank, got trainer\.workers = 2; use"),
        ("auto", 1, True, r"^trainer\.offload: the backend 'plain', which 'auto' is on one CPU rank, does"),
    ):
        with pytest.raises(ValueError, match=message):
            find_backend(name, workers=workers, offload=offload, on_cpu=True)


def train_shares(engine: TrainEngine) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Makes two updates with this rank's samples of their groups; returns metrics, and the weights on rank 0."""
    metrics = []
    for seed in range(2):
        engine.accumulate(share(group_of(engine, seed), engine.layout), 1 / 8)
        metrics.append(engine.step())
    weights = export(engine, 1)
    return metrics, {name: tensor.clone() for name, tensor in unpack(*weights)} if weights is not None else {}


def work(rank: int, folder: Path, config: Config) -> tuple[str, Any]:
    sys.path.insert(0, str(folder))
    engine = started(config, rank=rank)
    return type(engine._model).__name__, train_shares(engine)


def test_a_backend_of_another_package_trains_what_ours_train(package):
    changes = {"kl_coef": 0.05, "ema": {"every": 1}, "optimizer": "sgd", "cfg": 2.0}
    config = make_config(**changes, backend="summing", workers=2)
    backend, (metrics, weights) = on_ranks(2, work, package, config)[0]
    assert backend == "Summing"
    for ours in ("plain", "fsdp2"):
        expected, of_ours = train_shares(started(make_config(**changes, backend=ours)))
        for got, one in zip(metrics, expected, strict=True):
            assert got == pytest.approx(one, rel=1e-4, abs=1e-6)
        assert_close(weights, of_ours, atol=3e-6)


def test_layers_are_compiled_with_a_cache_of_each_rank(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    plain, config = started(make_config()), make_config(**{"trainer.compile": True})
    with torch.compiler.set_stance("force_eager"):  # what is compiled is torch's own affair, and takes a minute
        engine = started(config)
        layers = repeated_layers(engine._model.components["transformer"])
        assert layers and all(layer._compiled_call_impl is not None for layer in layers)
        assert update(engine) == update(plain)
    for rank in (0, 3):
        transformer = TinyTransformer()
        compile_layers(transformer, repeated_layers(transformer), rank)
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / f"rank_{rank}")


def test_a_model_without_repeated_layers_is_not_compiled():
    class Flat(TinyPolicy):
        def load_components(self, dtype: torch.dtype) -> dict[str, nn.Module]:
            return {"transformer": nn.Linear(2, 2)}

    with pytest.raises(ValueError, match=r"^trainer\.compile: Linear has no list of repeated layers to compile"):
        started(make_config(**{"trainer.compile": True}), Flat())
