"""A resumed engine is the engine that was saved, to the bit; a checkpoint is whole or not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from omni_async.config.schema import Config
from omni_async.training import checkpoint
from omni_async.training.engine import TrainEngine
from omni_async.training.errors import TrainingError
from tests.fakes import TinyPolicy, tiny_group

CPU = torch.device("cpu")
LORA = {"rank": 2, "alpha": 4.0}
MakeConfig = Callable[..., Config]


def started(config: Config) -> TrainEngine:
    engine = TrainEngine(config, TinyPolicy(), rank=0, world_size=1, device=CPU)
    engine.setup()
    return engine


def update(engine: TrainEngine, seed: int) -> dict[str, float]:
    engine.accumulate(tiny_group(TinyPolicy(), engine.config, seed), 1 / 8)
    return engine.step()


@pytest.mark.parametrize("backend", ["plain", "fsdp2"])
@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("before", [0, 2])
def test_resuming_continues_bit_for_bit(
    make_config: MakeConfig, tmp_path: Path, backend: str, lora: dict[str, float] | None, optimizer: str, before: int
) -> None:
    config = make_config(
        **{
            "trainer.backend": backend,
            "model.lora": lora,
            "trainer.optimizer.name": optimizer,
            "trainer.optimizer.momentum": 0.9,
            "trainer.optimizer.schedule": "cosine",
            "trainer.optimizer.warmup_steps": 1,
        }
    )
    engine = started(config)
    for seed in range(before):
        update(engine, seed)
    engine.save(tmp_path / "checkpoints" / "v2", {"version": 2, "cursor": [1, 2]})
    expected = [update(engine, seed) for seed in (5, 6)]

    resumed = started(config)
    update(resumed, 9)  # whatever it did before, loading replaces it
    assert resumed.load(tmp_path / "checkpoints" / "v2") == {"version": 2, "cursor": [1, 2]}
    assert resumed.optimizer_steps == before
    assert [update(resumed, seed) for seed in (5, 6)] == expected
    assert resumed.export(4)[0].digest == engine.export(4)[0].digest


def test_a_lora_checkpoint_holds_adapters_only(make_config: MakeConfig, tmp_path: Path) -> None:
    engine = started(make_config(**{"model.lora": LORA}))
    engine.save(tmp_path / "c", {})
    stored = FileSystemReader(tmp_path / "c").read_metadata().state_dict_metadata
    assert stored
    assert all(".lora_" in name for name in stored)


def test_saving_leaves_nothing_beside_and_may_replace(make_config: MakeConfig, tmp_path: Path) -> None:
    engine = started(make_config())
    for version in (1, 2):
        update(engine, version)
        engine.save(tmp_path / "latest", {"version": version})
    assert [p.name for p in tmp_path.iterdir()] == ["latest"]
    assert started(make_config()).load(str(tmp_path / "latest")) == {"version": 2}


def test_an_interrupted_save_keeps_the_old_checkpoint(make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started(make_config())
    engine.save(tmp_path / "c", {"version": 1})
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.msgspec.json, "encode", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.save(tmp_path / "c", {"version": 2})
    assert started(make_config()).load(tmp_path / "c") == {"version": 1}
    engine.save(tmp_path / "c", {"version": 3})
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_a_checkpoint_of_something_else_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    started(make_config()).save(tmp_path / "full", {})
    with pytest.raises(TrainingError, match="is of another model, LoRA setting"):
        started(make_config(**{"model.lora": LORA})).load(tmp_path / "full")
    with pytest.raises(TrainingError, match=r"is not a checkpoint: it has no state\.json"):
        started(make_config()).load(tmp_path)
