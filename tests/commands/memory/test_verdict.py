"""Tests what a run's accelerators hold, whether it fits, and what the command prints of it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from omni_async import cli
from omni_async.commands.memory import estimate
from omni_async.commands.memory.amounts import GIB, Amount
from omni_async.commands.memory.devices import DEVICES, bytes_of_device, shared_devices
from omni_async.commands.memory.engine import MeasuredEngine, estimate_engine
from omni_async.commands.memory.scorers import _server
from omni_async.commands.memory.trainer import MeasuredTrainer, checkpoint_bytes, estimate_trainer, rows_of
from omni_async.commands.memory.verdict import judge, ways_out
from omni_async.config import Config, ConfigError
from omni_async.config.reward import Server
from omni_async.config.section import Resources
from tests.support.configs import build
from tests.support.places import ROOT

WAN = str(ROOT / "recipes/wan22_dance/dance_grpo.yaml")


def recipe(**changes: Any) -> Config:
    return build({"placement": {"rollout": {"gpus": 1}, "trainer": {"gpus": 1}}}, changes)


def gib(number: float) -> int:
    return int(number * GIB)


def test_a_device_is_a_name_or_a_number_of_gib():
    assert bytes_of_device("48") == 48 * GIB
    assert bytes_of_device("h200") == gib(DEVICES["h200"])
    for wrong in ("0", "-3", "nan", "1e-12", "h200x"):
        with pytest.raises(ConfigError, match=r"^--device: "):
            bytes_of_device(wrong)


def test_processes_that_ask_for_a_part_share_a_device():
    assert shared_devices(recipe()) == [("rollout",), ("trainer",)]
    half = {"placement.rollout": {"gpus": 0.5}}
    assert shared_devices(recipe(**half, **{"rollout.workers": 3})) == [
        ("rollout",),
        ("rollout", "rollout"),
        ("trainer",),
    ]
    assert shared_devices(recipe(**{"placement.colocated": True})) == [("rollout", "trainer")]
    ranks = {"trainer.workers": 4, "trainer.sequence_parallel": 2}
    assert shared_devices(recipe(**ranks)) == [("rollout",), ("trainer",)]
    halves = shared_devices(recipe(**ranks, **{"placement.trainer": {"gpus": 0.5}}))
    assert halves == [("rollout",), ("trainer", "trainer")]
    assert shared_devices(build({})) == []


def test_a_device_holds_the_sum_of_its_processes():
    roles = [
        Amount(role="rollout", workers=1, weights=gib(40), activations=gib(2), decode=gib(9), context=gib(1)),
        Amount(role="trainer", workers=1, weights=gib(10), states=gib(20), activations=gib(5), helps=("a key",)),
        Amount(role="judge", workers=1, weights=gib(5), states=gib(65), spare=gib(65)),
        Amount(role="reward", workers=1, weights=None),
    ]
    devices = [("rollout",), ("rollout", "trainer"), ("judge",), ("reward",)]
    alone, both, judge_, unknown = judge(roles, devices, gib(75))
    assert alone.fits
    assert alone.nbytes == gib(50)
    assert alone.verdict == "fits"
    assert not both.fits
    assert both.verdict == "does not fit, 10.0 GiB too much"
    assert ways_out(both, roles) == ["a key"]
    assert judge_.verdict == "fits"  # its cache is as large as there is room
    assert unknown.verdict == "at least; the model of reward is not known"
    assert judge(roles, [("rollout",)], gib(51))[0].verdict.startswith("tight")


def measured(cls: Any, **numbers: int) -> Any:
    made = object.__new__(cls)
    vars(made).update(numbers)
    return made


TRAINED = {"trained": 800, "frozen": 0, "largest": 100, "largest_trained": 100, "rest": 10, "rest_trained": 10}


def test_a_ranks_part_of_a_full_model_is_four_float32_copies_over_the_ranks():
    config = recipe(**{"trainer.workers": 4, "model.dtype": "bfloat16"})
    amount = estimate_trainer(config, measured(MeasuredTrainer, **TRAINED, peak=5000), context=7)
    assert amount.weights == 800  # 4 bytes, over 4 ranks
    assert amount.states == 2400  # gradients and two moments
    assert amount.activations == 5000 + (2 * 100 + 10) * 2 + 100 * 6  # gathered in bfloat16; reduced in float32
    assert amount.host == 400  # buckets in bfloat16
    copies = recipe(**{"trainer.workers": 4, "model.dtype": "bfloat16", "trainer.shard": 2, "trainer.ema": {}})
    shared = estimate_trainer(copies, measured(MeasuredTrainer, **TRAINED, peak=5000), context=7)
    assert shared.weights == 1600
    assert shared.states == 1600 * 4
    assert any(help_.startswith("trainer.shard: null") for help_ in shared.helps)


def test_under_lora_frozen_weights_are_in_the_models_dtype():
    lora = {"rank": 2, "alpha": 4.0}
    config = recipe(**{"trainer.workers": 2, "model.dtype": "bfloat16", "model.lora": lora, "weights.payload": "lora"})
    numbers = {**TRAINED, "trained": 80, "frozen": 720, "largest_trained": 10, "rest_trained": 0}
    amount = estimate_trainer(config, measured(MeasuredTrainer, **numbers, peak=0), context=0)
    assert amount.weights == 720 + 160
    assert amount.states == 3 * 160
    assert amount.host == 160
    alone = recipe(**{"trainer.workers": 2, "trainer.shard": 1, "model.dtype": "bfloat16", "model.lora": lora})
    whole = estimate_trainer(alone, measured(MeasuredTrainer, **numbers, peak=0), context=0)
    assert whole.weights == 1440 + 320
    assert whole.activations == (2 * 100 + 10) * 2 + 10 * 6  # FSDP2's copies of two layers and of the rest


@pytest.mark.parametrize("name", ["flow_grpo", "distill"])
def test_a_teacher_takes_two_copies_of_all_weights_and_nothing_in_checkpoints(name):
    ranks = {"trainer.workers": 4, "model.dtype": "bfloat16"}
    taught = ranks | {"algorithm.name": name, "algorithm.teacher": {"path": "t"}}
    lora = {"model.lora": {"rank": 2, "alpha": 4.0}}
    frozen = {**TRAINED, "trained": 80, "frozen": 720, "largest_trained": 10, "rest_trained": 0}
    for changes, numbers, teacher in (({}, TRAINED, 800 * 4), (lora, frozen, 720 * 2)):
        rank = measured(MeasuredTrainer, **numbers, peak=0)
        alone, both = (estimate_trainer(recipe(**one, **changes), rank, context=0) for one in (ranks, taught))
        assert both.states - alone.states == 2 * teacher // 4
        assert (both.weights, both.activations, both.host) == (alone.weights, alone.activations, alone.host)
        assert checkpoint_bytes(recipe(**taught, **changes), rank) == checkpoint_bytes(recipe(**ranks, **changes), rank)


def test_an_optimizer_that_is_not_fused_has_temporaries():
    numbers = {**TRAINED, "trained": 8000}
    for fused, temporaries in ((None, 0), (True, 0), (False, 32_000)):
        config = recipe(**{"trainer.optimizer.fused": fused})
        amount = estimate_trainer(config, measured(MeasuredTrainer, **numbers, peak=0), context=0)
        assert amount.activations == max((2 * 100 + 10) * 4 + 100 * 8, temporaries)


def test_weights_that_are_gathered_for_a_step_are_all_there():
    ranks = {"trainer.workers": 4, "model.dtype": "bfloat16", "trainer.gather": "step"}
    amount = estimate_trainer(recipe(**ranks), measured(MeasuredTrainer, **TRAINED, peak=5000), context=0)
    assert amount.activations == 5000 + 800 * 2 + 100 * 6
    assert "trainer.gather: layer (two layers are whole at once)" in amount.helps


def test_groups_that_share_micro_batches_fill_them():
    shared = {"rollout.group_size": 4, "trainer.workers": 2, "trainer.micro_batch_size": 16}
    alone, both = (
        rows_of(recipe(**shared, **{"trainer.groups_per_update": 2, "trainer.groups_per_micro_batch": groups}))
        for groups in (1, 2)
    )
    assert both == 2 * alone <= 16


def test_each_copy_of_the_weights_has_its_checkpoint_in_memory():
    numbers = measured(MeasuredTrainer, **TRAINED)
    ranks = {"trainer.workers": 4, "trainer.shard": 2}
    assert checkpoint_bytes(recipe(**{"trainer.workers": 4}), numbers) == 800 * 4 * 3
    assert checkpoint_bytes(recipe(**ranks), numbers) == 2 * 800 * 4 * 3
    assert checkpoint_bytes(recipe(**ranks, **{"trainer.ema": {}}), numbers) == 2 * 800 * 4 * 4


def test_what_is_offloaded_lies_in_host_memory():
    config = recipe(**{"trainer.offload": True, "trainer.backend": "fsdp2", "rollout.offload": True})
    amount = estimate_trainer(config, measured(MeasuredTrainer, **TRAINED, peak=5000), context=0)
    assert (amount.weights, amount.states) == (0, 0)
    assert amount.host == 3200 + 3 * 3200 + 3200  # weights, states and float32 buckets
    engine = measured(MeasuredEngine, denoisers=1000, encoders=600, decoders=50, step=100, decode=80)
    amount = estimate_engine(config, engine, context=0)
    assert (amount.weights, amount.activations, amount.host) == (1050, 600, 600)
    resident = estimate_engine(recipe(), engine, context=0)
    assert (resident.weights, resident.activations, resident.host) == (1650, 100, 0)


@pytest.mark.parametrize(
    ("args", "gib_of_cache"),
    [((), 0.92 * 50), (("--gpu-memory-utilization", "0.5"), 25), (("--gpu-memory-utilization=0.3",), 15)],
)
def test_a_judge_takes_the_share_of_its_arguments(args, gib_of_cache):
    server = Server(name="judge", model="no/model", resources=Resources(gpus=1), args=args)
    assert _server(server, 0, 50 * GIB).states == gib(gib_of_cache)


@pytest.mark.parametrize("share", ["high", "nan", "1.5", "0"])
def test_a_share_that_is_none_is_refused(share):
    server = Server(
        name="judge", model="no/model", resources=Resources(gpus=1), args=(f"--gpu-memory-utilization={share}",)
    )
    with pytest.raises(ConfigError, match=rf"^reward.servers.args: .* expected a number in \(0, 1\], got {share}$"):
        _server(server, 0, GIB)


def test_pairs_are_estimated(capsys):
    recipe_ = "recipes/quickstart/algorithms/diffusion_dpo_offline.yaml"
    assert cli.main(["check", str(ROOT / recipe_), "--device", "48", "placement.trainer.gpus=1"]) == 0
    printed = capsys.readouterr().out
    assert "trainer x 1" in printed
    assert re.fullmatch(r"fits: the fullest device \(48\) has trainer, \S+ of 48\.0 GiB", printed.splitlines()[-1])


def test_what_cannot_be_estimated_is_one_line(tmp_path, capsys, monkeypatch):
    changes = ["rollout.sde.kind=cps", "algorithm.name=grpo_guard"]
    assert cli.main(["check", WAN, "--device", "80", *changes]) == 2
    monkeypatch.setattr(estimate, "MeasuredTrainer", lambda *_: {}["in_channels"])
    assert cli.main(["check", WAN, "--device", "80"]) == 2
    guard, model = capsys.readouterr().err.splitlines()
    assert "grpo_guard" in guard and model.endswith("cannot be estimated: KeyError: 'in_channels'")


def test_the_command_refuses_what_does_not_fit(capsys):
    """A few seconds: one estimate of a published recipe, by the command line."""
    assert cli.main(["check", WAN, "--device", "36"]) == 2
    printed = capsys.readouterr()
    assert "configuration of the published Wan2.2-TI2V-5B-Diffusers" in printed.out
    assert re.search(r"^rollout x 3 +21\.2 +0\.5 +2\.1 +9\.1 +0\.7 +31\.5 +-$", printed.out, re.M)
    assert re.search(r"^trainer x 4 +4\.7 +14\.0 +18\.9 +- +0\.7 +38\.2 +2\.3$", printed.out, re.M)
    assert "does not fit, 2.2 GiB too much" in printed.out
    [line] = printed.err.splitlines()
    assert line.startswith("omni-async: --device: trainer takes ")
    assert "trainer.micro_batch_size: less than 4" in line
