"""Tests reference, old policy and moving average: what they compute, how they follow, what is published and kept of
them, and that the policy in training does not change."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader

from omni_async.training import TrainingError
from omni_async.training.engine import TrainEngine
from omni_async.training.groups import Needs
from omni_async.weights.buckets import digest_tensors, unpack
from omni_async.weights.digest import verify
from omni_async.weights.shards import whole
from tests.fakes import TinyPolicy, load_model, tiny_group
from tests.training.training_world import auxiliary_of, export, load, log_probs, make_config, save, started

LORA = {"rank": 2, "alpha": 4.0}
NFT = {"name": "diffusion_nft", "sde": None, "clip_range": None}

backends = pytest.mark.parametrize("backend", ["plain", "fsdp2"])
loras = pytest.mark.parametrize("lora", [None, LORA])


def update(engine: TrainEngine, seed: int) -> dict[str, float]:
    engine.accumulate(tiny_group(TinyPolicy(), engine.config, seed), 1 / 20)
    return engine.step()


def policy(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: whole(p).clone() for name, p in engine._model.trainable.items()}


def velocity(engine: TrainEngine, which: Any = None) -> Tensor:
    """Returns the velocity of the policy in training or another one, at two fixed points."""
    generator = torch.Generator().manual_seed(0)
    samples = [t["conditioning"] for t in tiny_group(TinyPolicy(), engine.config).trajectories[:2]]
    conditioning, spec = TinyPolicy().stack_conditioning(samples), engine.config.rollout.sampling
    at = (torch.randn(2, 6, 4, generator=generator), torch.tensor([0.3, 0.9]), conditioning, spec)
    at += (Needs(["transformer"] * 2, ("transformer",)),)
    with torch.no_grad():
        return engine._model.velocity(*at) if which is None else engine._model.auxiliary_velocity(which, *at)


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 0.0) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name].double(), tensor.double(), rtol=0, atol=atol)


def mixed(decay: float, old: dict[str, Tensor], new: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: decay * tensor.double() + (1 - decay) * new[name].double() for name, tensor in old.items()}


# ---- what they compute -----------------------------------------------------------------------------------------------


@backends
@loras
def test_the_reference_stays_the_model_as_loaded(backend, lora):
    engine = started(make_config(kl_coef=0.1, backend=backend, lora=lora))
    loaded, before = policy(engine), velocity(engine)
    for seed in (0, 1):
        update(engine, seed)
    assert (velocity(engine) - before).abs().max() > 1e-2
    assert torch.equal(velocity(engine, "reference"), before)
    assert_same(auxiliary_of(engine, "reference"), loaded if lora is None else {})


@backends
def test_a_auxiliary_under_lora_holds_adapters_alone(backend):
    changes = {"backend": backend, "lora": LORA, "kl_coef": 0.1, "ema": {"every": 1}}
    engine = started(make_config(**NFT, **changes))
    assert {name.split(".")[0] for name in engine._model.auxiliary.tensors()} == {"ema", "old"}
    assert all(".lora_" in name for name in engine._model.auxiliary.tensors())
    before = velocity(engine)
    update(engine, 0)
    assert (velocity(engine, "old") - velocity(engine)).abs().max() > 0
    assert torch.equal(velocity(engine, "reference"), before)


def test_there_are_only_the_auxiliary_policies_that_the_settings_need():
    engine = started(make_config())
    assert engine._model.auxiliary.tensors() == {}
    with pytest.raises(TrainingError, match="there is no old policy: the objective did not ask for one"):
        velocity(engine, "old")


# ---- how they follow -------------------------------------------------------------------------------------------------


@backends
@loras
def test_the_old_policy_follows_once_an_update_by_the_updates_number(backend, lora):
    changes = {"backend": backend, "lora": lora, "steps_per_update": 2, "trainer.optimizer.lr": 0.1}
    engine = started(make_config(**NFT, **changes))
    expected = policy(engine)
    for number in (1, 2, 3):
        update(engine, number)
        assert_same(auxiliary_of(engine, "old"), expected, atol=1e-6)
        update(engine, number + 10)
        previous, expected = expected, mixed(0.001 * number, expected, policy(engine))
        assert_same(auxiliary_of(engine, "old"), expected, atol=1e-6)
    # The decay of optimizer steps instead of updates would give other values.
    wrong = mixed(0.006, previous, policy(engine))
    assert max((wrong[name] - expected[name]).abs().max().item() for name in expected) > 1e-5


@pytest.mark.parametrize(("decay", "exactly"), [("none", True), ("late", True), ("slow", False)])
def test_the_other_schedules_start_as_the_policy_itself(decay, exactly):
    engine = started(make_config(**NFT, nft={"decay": decay}))
    for seed in (0, 1):
        update(engine, seed)
    same = all(torch.equal(auxiliary_of(engine, "old")[name], tensor) for name, tensor in policy(engine).items())
    assert same == exactly
    assert torch.equal(velocity(engine, "old"), velocity(engine)) == exactly


@pytest.mark.parametrize(
    ("warmup", "decays"), [("ratio", {2: 2 / 11, 4: 0.3, 6: 0.3}), ("linear", {2: 0.001, 4: 0.003, 6: 0.005})]
)
def test_the_moving_average_follows_every_so_many_steps(warmup, decays):
    changes = {"ema": {"decay": 0.3, "warmup": warmup, "every": 2}, "trainer.optimizer.lr": 0.1}
    engine = started(make_config(**changes))
    expected = policy(engine)
    for taken in range(1, 7):
        update(engine, taken)
        if taken in decays:
            expected = mixed(decays[taken], expected, policy(engine))
        assert_same(auxiliary_of(engine, "ema"), expected, atol=1e-6)


# ---- the policy does not notice --------------------------------------------------------------------------------------


@backends
@loras
def test_using_a_auxiliary_changes_neither_weights_nor_gradients(backend, lora):
    config = make_config(**NFT, backend=backend, lora=lora, ema={"every": 3})
    engine, quiet = started(config), started(config)
    groups = [tiny_group(TinyPolicy(), config, seed) for seed in (1, 2)]
    for e in (engine, quiet):
        update(e, 0)
        e.accumulate(groups[0], 1 / 20)
    before, at = policy(engine), velocity(engine)
    for which in ("old", "ema"):
        assert not torch.equal(velocity(engine, which), at)
    export(engine, 1)
    averaged = velocity(engine, "ema")
    with pytest.raises(RuntimeError, match="'old' cannot be used inside 'ema'"), engine._model.auxiliary.using("ema"):
        assert torch.equal(velocity(engine), averaged)
        velocity(engine, "old")
    assert_same(policy(engine), before)
    assert torch.equal(velocity(engine), at)
    for e in (engine, quiet):
        e.accumulate(groups[1], 1 / 20)
    got, expected = (
        {name: whole(p.grad) for name, p in e._model.trainable.items() if p.grad is not None} for e in (engine, quiet)
    )
    assert_same(got, expected)
    assert engine.step() == quiet.step()
    assert_same(policy(engine), policy(quiet))


@pytest.mark.parametrize("after", ["load", "step"])
def test_sharded_parameters_are_gathered_anew_once_they_changed(tmp_path, after):
    config = make_config(backend="fsdp2")
    group = tiny_group(TinyPolicy(), config)
    other, engine = started(config), started(config)
    other.accumulate(group, 1 / 8)
    other.step()
    save(other, tmp_path / "c")
    if after == "step":
        engine.accumulate(group, 1 / 8)
    before = log_probs(engine, group)  # leaves parameters gathered
    if after == "step":
        engine.step()
    else:
        load(engine, tmp_path / "c")
    assert torch.equal(log_probs(engine, group), log_probs(other, group))
    assert not torch.equal(log_probs(engine, group), before)


# ---- what is published and kept --------------------------------------------------------------------------------------


@backends
@pytest.mark.parametrize("decay", ["slow", "none"])
@pytest.mark.parametrize("payload", ["full", "lora"])
def test_the_old_policy_is_what_is_published(backend, decay, payload):
    changes = {"backend": backend, "payload": payload, "lora": LORA if payload == "lora" else None}
    engine = started(make_config(**NFT, **changes, nft={"decay": decay}))
    at_start = export(engine, 0)  # nothing was computed yet
    assert at_start is not None
    assert at_start[0].digest == (engine.digest0 if payload == "full" else digest_tensors(policy(engine).items()))
    update(engine, 0)
    exported = export(engine, 1)
    assert exported is not None
    verify(*exported)
    assert_same(dict(unpack(*exported)), auxiliary_of(engine, "old"))
    assert (exported[0].digest == digest_tensors(policy(engine).items())) == (decay == "none")
    assert exported[0].digest != at_start[0].digest


@backends
def test_a_full_payload_has_the_old_policys_adapters_merged(backend):
    engine = started(make_config(**NFT, backend=backend, lora=LORA))
    for seed in (0, 1):
        update(engine, seed)
    expected = dict(load_model(TinyPolicy()).named_parameters())
    for name, down in auxiliary_of(engine, "old").items():
        if "lora_A" in name:
            up = auxiliary_of(engine, "old")[name.replace("lora_A", "lora_B")]
            expected[name.replace(".lora_A", "")] = expected[name.replace(".lora_A", "")] + 2.0 * up @ down
    exported = export(engine, 2)
    assert exported is not None
    assert_same(dict(unpack(*exported)), {name: p.detach() for name, p in expected.items()}, atol=1e-7)


@backends
@loras
def test_resuming_continues_auxiliarys_bit_for_bit(tmp_path, backend, lora):
    changes = {"backend": backend, "lora": lora, "ema": {"every": 2}, "kl_coef": 0.1}
    config = make_config(**NFT, **changes)
    engine = started(config)
    for seed in (0, 1, 2):
        update(engine, seed)
    save(engine, tmp_path / "c")
    stored = HuggingFaceStorageReader(str(tmp_path / "c" / "tensors")).read_metadata().state_dict_metadata
    kinds = {name.split(".")[1] for name in stored if name.startswith("auxiliary.")}
    assert kinds == ({"old", "ema", "reference"} if lora is None else {"old", "ema"})
    expected = [update(engine, seed) for seed in (5, 6)]

    resumed = started(config)
    update(resumed, 9)
    load(resumed, tmp_path / "c")
    assert [update(resumed, seed) for seed in (5, 6)] == expected
    for which in ("old", "ema", "reference"):
        assert_same(auxiliary_of(resumed, which), auxiliary_of(engine, which))
        if which != "ema":
            assert torch.equal(velocity(resumed, which), velocity(engine, which))
    published = [export(e, 5) for e in (resumed, engine)]
    assert published[0] is not None
    assert published[1] is not None
    assert published[0][0].digest == published[1][0].digest


def test_a_resumed_run_knows_how_far_it_is(tmp_path):
    changes = {"name": "awm", "sde": None, "trainer.updates": 4, "steps_per_update": 2}
    engine = started(make_config(**changes))
    seen = []
    for seed in range(10):
        update(engine, seed)
        seen.append(engine._loss._progress)
        if seed == 5:
            save(engine, tmp_path / "c")
    assert seen == [0, 0.25, 0.25, 0.5, 0.5, 0.75, 0.75, 1, 1, 1]
    resumed = started(engine.config)
    load(resumed, tmp_path / "c")
    assert resumed._loss._progress == 0.75


def test_loading_forgets_the_update_that_was_under_way(tmp_path):
    config = make_config(correction={"mode": "decoupled"}, steps_per_update=2)
    engine, group = started(config), tiny_group(TinyPolicy(), config)
    save(engine, tmp_path / "c")
    engine.recompute_proximal(group)
    engine.accumulate(group, 1 / 8)
    engine.step()
    engine.accumulate(group, 1 / 8)
    assert engine.step()["ratio_deviation"] > 1e-3
    engine.recompute_proximal(group)
    engine.accumulate(group, 1 / 8)
    engine.step()
    load(engine, tmp_path / "c")
    fresh = started(config)
    for e in (engine, fresh):
        e.recompute_proximal(group)
        e.accumulate(group, 1 / 8)
    assert engine.step() == fresh.step()


@pytest.mark.parametrize(
    ("saved", "opened", "example"),
    [
        (NFT, {}, "auxiliary.old."),
        ({}, NFT, "auxiliary.old."),
        ({"kl_coef": 0.1}, {}, "auxiliary.reference."),
        ({}, {"ema": {"every": 1}}, "auxiliary.ema."),
    ],
)
def test_a_checkpoint_with_other_auxiliarys_is_refused(tmp_path, saved, opened, example):
    save(started(make_config(**saved)), tmp_path / "c")
    engine = started(make_config(**opened))
    before = policy(engine)
    message = rf"is of another model, LoRA setting, algorithm or trainer\.ema: '{example}.*' is in only one of the two"
    with pytest.raises(TrainingError, match=message):
        load(engine, tmp_path / "c")
    assert_same(policy(engine), before)
