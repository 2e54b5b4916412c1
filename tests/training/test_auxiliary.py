"""Tests reference, old policy and moving average."""

from typing import Any

import pytest
import torch
from torch import Tensor

from omni_async.training import TrainingError
from omni_async.training.engine import TrainEngine
from omni_async.training.groups import Needs
from omni_async.weights.buckets import digest_tensors, unpack
from omni_async.weights.digest import verify
from tests.support.fakes import TinyPolicy, load_model
from tests.training import training_world as world


def velocity(engine: TrainEngine, which: Any = None) -> Tensor:
    """Returns the velocity of the policy in training or another one, at two fixed points."""
    generator = torch.Generator().manual_seed(0)
    conditioning = TinyPolicy().stack_conditioning([t["conditioning"] for t in world.group_of(engine).trajectories[:2]])
    at = (torch.randn(2, 6, 4, generator=generator), torch.tensor([0.3, 0.9]), conditioning)
    at += (engine.config.rollout.sampling, Needs(["transformer"] * 2, ("transformer",)))
    with torch.no_grad():
        return engine._model.velocity(*at) if which is None else engine._model.auxiliary_velocity(which, *at)


def mixed(decay: float, old: dict[str, Tensor], new: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: decay * tensor.double() + (1 - decay) * new[name].double() for name, tensor in old.items()}


@pytest.mark.sliced(floor=2)
@world.backends
@world.loras
def test_the_reference_stays_the_model_as_loaded_and_under_lora_policies_hold_adapters_alone(backend, lora):
    engine = world.engine(**world.NFT, backend=backend, lora=lora, kl_coef=0.1, ema={"every": 1})
    kinds = {"ema", "old", "reference"} if lora is None else {"ema", "old"}
    assert {name.split(".")[0] for name in world.auxiliaries(engine)} == kinds
    assert all((".lora_" in name) == (lora is not None) for name in world.auxiliaries(engine))
    loaded, before = world.trainable(engine), velocity(engine)
    for seed in (0, 1):
        world.update(engine, seed)
    assert (velocity(engine) - before).abs().max() > 1e-2
    assert (velocity(engine, "old") - velocity(engine)).abs().max() > 0
    assert torch.equal(velocity(engine, "reference"), before)
    world.assert_close(world.auxiliary_of(engine, "reference"), loaded if lora is None else {})


def test_there_are_only_the_auxiliary_policies_that_the_settings_need():
    engine = world.engine()
    assert world.auxiliaries(engine) == {}
    with pytest.raises(TrainingError, match="there is no old policy: the objective did not ask for one"):
        velocity(engine, "old")


@pytest.mark.sliced(floor=2)
@world.backends
@world.loras
def test_the_old_policy_follows_once_an_update_by_the_updates_number(backend, lora):
    engine = world.engine(**world.NFT, backend=backend, lora=lora, steps_per_update=2, lr=0.1)
    expected = world.trainable(engine)
    for number in (1, 2, 3):
        world.update(engine, number)
        world.assert_close(world.auxiliary_of(engine, "old"), expected, atol=1e-6)
        world.update(engine, number + 10)
        previous, expected = expected, mixed(0.001 * number, expected, world.trainable(engine))
        world.assert_close(world.auxiliary_of(engine, "old"), expected, atol=1e-6)
    # The decay of optimizer steps instead of updates would give other values.
    wrong = mixed(0.006, previous, world.trainable(engine))
    assert max((wrong[name] - expected[name]).abs().max().item() for name in expected) > 1e-5


@pytest.mark.parametrize(
    ("warmup", "decays"), [("ratio", {2: 2 / 11, 4: 0.3, 6: 0.3}), ("linear", {2: 0.001, 4: 0.003, 6: 0.005})]
)
def test_the_moving_average_follows_every_so_many_steps(warmup, decays):
    engine = world.engine(ema={"decay": 0.3, "warmup": warmup, "every": 2}, lr=0.1)
    expected = world.trainable(engine)
    for taken in range(1, 7):
        world.update(engine, taken)
        if taken in decays:
            expected = mixed(decays[taken], expected, world.trainable(engine))
        world.assert_close(world.auxiliary_of(engine, "ema"), expected, atol=1e-6)


@pytest.mark.sliced(floor=2)
@world.backends
@world.loras
def test_using_an_auxiliary_policy_changes_neither_weights_nor_gradients(backend, lora):
    engine, quiet = (world.updated(1, **world.NFT, backend=backend, lora=lora, ema={"every": 3}) for _ in range(2))
    for e in (engine, quiet):
        e.accumulate(world.group_of(e, 1), 1 / 20)
    before, at = world.trainable(engine), velocity(engine)
    for which in ("old", "ema"):
        assert not torch.equal(velocity(engine, which), at)
    world.export(engine, 1)
    averaged = velocity(engine, "ema")
    with pytest.raises(RuntimeError, match="'old' cannot be used inside 'ema'"), engine._model.auxiliary.using("ema"):
        assert torch.equal(velocity(engine), averaged)
        velocity(engine, "old")
    world.assert_close(world.trainable(engine), before)
    assert torch.equal(velocity(engine), at)
    for e in (engine, quiet):
        e.accumulate(world.group_of(e, 2), 1 / 20)
    world.assert_close(world.gradients(engine), world.gradients(quiet))
    assert engine.step() == quiet.step()
    world.assert_close(world.trainable(engine), world.trainable(quiet))


@pytest.mark.parametrize("after", ["load", "step"])
def test_sharded_parameters_are_gathered_anew_once_they_changed(tmp_path, after):
    other, engine = world.updated(1, backend="fsdp2"), world.engine(backend="fsdp2")
    group = world.group_of(engine)
    world.save(other, tmp_path / "c")
    if after == "step":
        engine.accumulate(group, 1 / 8)
    before = world.log_probs(engine, group)  # leaves parameters gathered
    if after == "step":
        engine.step()
    else:
        world.load(engine, tmp_path / "c")
    assert torch.equal(world.log_probs(engine, group), world.log_probs(other, group))
    assert not torch.equal(world.log_probs(engine, group), before)


@pytest.mark.sliced(floor=2)
@world.backends
@pytest.mark.parametrize("decay", ["slow", "none"])
@pytest.mark.parametrize("payload", ["full", "lora"])
def test_the_old_policy_is_what_is_published(backend, decay, payload):
    lora = world.LORA if payload == "lora" else None
    engine = world.engine(**world.NFT, backend=backend, payload=payload, lora=lora, nft={"decay": decay})
    at_start, _ = world.export(engine, 0)  # nothing was computed yet
    assert at_start.digest == (engine.digest0 if payload == "full" else digest_tensors(world.trainable(engine).items()))
    world.update(engine)
    exported = world.export(engine, 1)
    verify(*exported)
    world.assert_close(dict(unpack(*exported)), world.auxiliary_of(engine, "old"))
    assert (exported[0].digest == digest_tensors(world.trainable(engine).items())) == (decay == "none")
    assert exported[0].digest != at_start.digest


@world.backends
def test_a_full_payload_has_the_old_policys_adapters_merged(backend):
    engine = world.updated(**world.NFT, backend=backend, lora=world.LORA)
    expected, old = dict(load_model(TinyPolicy()).named_parameters()), world.auxiliary_of(engine, "old")
    for name in (name for name in old if "lora_A" in name):
        layer = name.replace(".lora_A", "")
        expected[layer] = expected[layer] + 2.0 * old[name.replace("lora_A", "lora_B")] @ old[name]
    world.assert_close(
        dict(unpack(*world.export(engine, 2))), {name: p.detach() for name, p in expected.items()}, atol=1e-7
    )


def test_a_resumed_run_knows_how_far_it_is(tmp_path):
    engine = world.engine(**{"name": "awm", "sde": None, "trainer.updates": 4, "steps_per_update": 2})
    seen = []
    for seed in range(10):
        world.update(engine, seed)
        seen.append(engine._loss._progress)
        if seed == 5:
            world.save(engine, tmp_path / "c")
    assert seen == [0, 0.25, 0.25, 0.5, 0.5, 0.75, 0.75, 1, 1, 1]
    resumed = world.started(engine.config)
    world.load(resumed, tmp_path / "c")
    assert resumed._loss._progress == 0.75


def test_loading_forgets_the_update_that_was_under_way(tmp_path):
    config = world.make_config(correction={"mode": "decoupled"}, steps_per_update=2)
    engine, fresh = world.started(config), world.started(config)
    group = world.group_of(engine)
    world.save(engine, tmp_path / "c")
    engine.recompute_proximal(group)
    world.step_on(engine, group)
    assert world.step_on(engine, group)["ratio_deviation"] > 1e-3
    engine.recompute_proximal(group)
    world.step_on(engine, group)
    world.load(engine, tmp_path / "c")
    for e in (engine, fresh):
        e.recompute_proximal(group)
    assert world.step_on(engine, group) == world.step_on(fresh, group)


@pytest.mark.parametrize(
    ("saved", "opened", "example"),
    [
        (world.NFT, {}, "auxiliary.old."),
        ({}, world.NFT, "auxiliary.old."),
        ({"kl_coef": 0.1}, {}, "auxiliary.reference."),
        ({}, {"ema": {"every": 1}}, "auxiliary.ema."),
        ({}, {"lora": world.LORA}, ""),
    ],
)
def test_a_checkpoint_of_other_tensors_is_refused(tmp_path, saved, opened, example):
    world.save(world.engine(**saved), tmp_path / "c")
    engine = world.engine(**opened)
    before = world.trainable(engine)
    message = rf"is of another model, LoRA setting, algorithm or trainer\.ema: '{example}.*' is in only one of the two"
    with pytest.raises(TrainingError, match=message):
        world.load(engine, tmp_path / "c")
    world.assert_close(world.trainable(engine), before)
