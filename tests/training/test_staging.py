"""Tests that checkpoints are copied into the same memory, and only when nothing is written from it."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager

from omni_async.training import checkpoint, model
from tests.training import training_world as world


def test_every_checkpoint_is_copied_into_the_memory_of_the_first(monkeypatch, tmp_path):
    engine = world.engine(ema={"every": 1})
    stage, memory = engine._model._stager.stage, []

    def staged(tensors: dict[str, Any]) -> dict[str, Any]:
        copies = stage(tensors)
        memory.append({name: copy.data_ptr() for name, copy in copies.items()})
        return copies

    monkeypatch.setattr(engine._model._stager, "stage", staged)
    world.save(engine, tmp_path / "before the optimizer has a state")
    weights = []
    for number in (1, 2):
        world.update(engine, number)
        world.save(engine, tmp_path / str(number))
        weights.append(world.trainable(engine))
    first, second, third = memory
    assert second == third and first.items() <= second.items() and len(first) < len(second)
    assert not torch.equal(*(its["transformer.img_in.weight"] for its in weights))
    for number, expected in enumerate(weights, start=1):
        world.load(engine, tmp_path / str(number))
        world.assert_close(world.trainable(engine), expected)


def test_a_stager_that_clears_itself_is_replaced(monkeypatch, tmp_path):
    stage = DefaultStager.stage

    def as_torch_2_11(stager: DefaultStager, tensors: dict[str, Any]) -> Any:
        copies = stage(stager, tensors)
        stager._state_dict_stager.close()
        return copies

    monkeypatch.setattr(DefaultStager, "stage", as_torch_2_11)
    monkeypatch.setattr(checkpoint, "STAGERS_LAST", False)
    engine = world.engine()
    for number in (1, 2):
        world.update(engine, number)
        world.save(engine, tmp_path / str(number))
    expected = world.trainable(engine)
    world.load(engine, tmp_path / "2")
    world.assert_close(world.trainable(engine), expected)


def test_a_checkpoint_waits_until_the_earlier_one_is_written(monkeypatch, tmp_path):
    engine, order = world.engine(), []
    monkeypatch.setattr(model, "wait", order.append)
    monkeypatch.setattr(checkpoint, "begin_save", lambda *args: order.append("copied") or Future())
    earlier, _ = engine.begin_save(tmp_path)
    engine.begin_save(tmp_path)
    assert order == [[], "copied", [earlier], "copied"]


def test_the_number_of_a_fused_step_is_on_the_device_of_its_weight():
    weight = torch.nn.Parameter(torch.empty(2, device="meta"))
    for fused, device in ((True, "meta"), (None, "cpu")):
        optimizer = torch.optim.AdamW([weight], fused=fused)
        found = checkpoint._allocate({"w": weight}, optimizer, {"optimizer.step.w", "optimizer.exp_avg.w"})
        assert {key: value.device.type for key, value in found.items()} == {
            "optimizer.step.w": device,
            "optimizer.exp_avg.w": "meta",
        }
