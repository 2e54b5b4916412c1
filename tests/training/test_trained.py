"""Tests that trained weights are read out of a checkpoint as the ranks that wrote it held them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from omni_async.training import TrainingError
from omni_async.training.trained import TrainedWeights
from tests.training.training_world import assert_close, auxiliary_of, make_config, nudge, read_trained, save, started
from tests.training.training_world import trainable as trainable_of


def stored(folder: Path, **changes: object) -> dict[str, dict[str, torch.Tensor]]:
    """Saves an engine's weights, which have moved since its other policies were copied; returns all of them."""
    engine = started(make_config(**changes))
    nudge(engine)
    save(engine, folder)
    held = {"trained": trainable_of(engine)}
    return held | {which: found for which in ("old", "ema") if (found := auxiliary_of(engine, which))}


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 3.0, "target_modules": ["to_q"]}])
def test_weights_and_adapters_have_diffusers_names(tmp_path: Path, lora: object) -> None:
    held = stored(tmp_path, **{"model.lora": lora})
    assert_close(read_trained(tmp_path), held["trained"])
    assert TrainedWeights(tmp_path).is_adapter == (lora is not None)


def test_the_policy_that_draws_is_read_unless_another_is_asked_for(tmp_path: Path) -> None:
    held = stored(tmp_path, name="diffusion_nft", **{"trainer.ema": {"decay": 0.9}})
    assert held.keys() == {"trained", "old", "ema"}
    for policy, expected in (("drawing", "old"), ("trained", "trained"), ("old", "old"), ("ema", "ema")):
        assert_close(read_trained(tmp_path, policy), held[expected])
    assert not torch.equal(*(next(iter(held[one].values())) for one in ("old", "trained")))


@pytest.mark.parametrize(("most", "fewest", "largest"), [(1, 40, 40), (3000, 2, 39), (2**40, 1, 1)])
def test_all_tensors_can_be_read_a_few_at_a_time(
    most: int, fewest: int, largest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = stored(tmp_path)["trained"]
    weights = TrainedWeights(tmp_path)
    (component,) = weights.components
    read, sizes = weights.read, []

    def reading(component: str, names: list[str]) -> dict[str, torch.Tensor]:
        found = read(component, names)
        sizes.append([tensor.nbytes for tensor in found.values()])
        return found

    monkeypatch.setattr(weights, "read", reading)
    assert_close({f"{component}.{name}": one for name, one in weights.stream(component, most)}, held)
    assert all(len(one) == 1 or sum(one) <= most for one in sizes)
    assert fewest <= len(sizes) <= largest


def test_what_is_not_there_is_one_line(tmp_path: Path) -> None:
    stored(tmp_path / "c")
    with pytest.raises(TrainingError, match="has no 'ema' policy; it has trained"):
        TrainedWeights(tmp_path / "c", "ema")
    with pytest.raises(TrainingError, match="cannot be read"):
        TrainedWeights(tmp_path)
    (shard,) = (tmp_path / "c/tensors").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(TrainingError, match="cannot be read"):
        TrainedWeights(tmp_path / "c")


@pytest.mark.parametrize("offset", [10**6, 2**60, 10**400, -(10**6)], ids=["far", "further", "400 digits", "negative"])
def test_tensors_larger_than_their_files_take_no_memory(tmp_path: Path, offset: int) -> None:
    stored(tmp_path / "c")
    (shard,) = (tmp_path / "c/tensors").glob("*.safetensors")
    with safe_open(shard, "pt") as opened:
        tensors, about = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118
    places = json.loads(about["DCP_SHARDING_INFO"])
    name = max(tensors, key=lambda name: tensors[name].ndim)
    places[name]["saved_offsets"][0] = offset
    save_file(tensors, shard, about | {"DCP_SHARDING_INFO": json.dumps(places)})
    with pytest.raises(TrainingError, match="cannot be read") as refused:
        weights = TrainedWeights(tmp_path / "c")
        for component in weights.components:
            weights.read(component)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 1000
