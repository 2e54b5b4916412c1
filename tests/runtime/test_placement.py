"""Tests which bundle every actor is placed in, what it asks of it, and what it is built with."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from omni_async.config.role_table import BUILT_IN, CONTROL
from omni_async.config.schema import Config
from omni_async.config.section import Resources
from omni_async.control.control_state import ControlState, LedgerState
from omni_async.plugins.families import find_family
from omni_async.roles.builders import WorkerContext, coordinator, trainer
from omni_async.roles.inputs import RunInputs
from omni_async.runtime.placement import ActorPlacement, plan_placements
from omni_async.runtime.preflight.check import preflight
from omni_async.store import LocalStore
from omni_async.worker import Worker
from tests.runtime.runtime_world import write_world

GPUS = {"rollout": {"cpus": 2, "gpus": 1}, "reward": {"cpus": 4}, "trainer": {"cpus": 2.5, "gpus": 1}}


def config(placement: dict[str, Any], **sections: Any) -> Config:
    """Returns a job of two engines, a reward worker and two ranks."""
    raw = {"model": {"path": "m"}, "data": {"prompts": "p"}, "placement": placement}
    return msgspec.convert(raw | {"rollout": {"workers": 2}, "trainer": {"workers": 2}} | sections, Config)


def names(made: Config) -> dict[str, list[str]]:
    return {spec.role: [str(worker) for worker in spec.workers(made)] for spec in BUILT_IN}


def test_every_actor_has_a_bundle_of_its_own() -> None:
    actors = plan_placements(config(GPUS))
    engine, rank = Resources(cpus=2, gpus=1), Resources(cpus=2.5, gpus=1)
    assert actors.bundles == (CONTROL, engine, engine, Resources(cpus=4), rank, rank)
    assert [placement.bundle for placement in actors.actors.values()] == list(range(6))
    assert actors.actors["trainer-1"] == ActorPlacement(5, 2.5, 1, 2)
    assert actors.cpus == 14  # 13.01


def test_roles_that_share_devices_are_in_one_bundle() -> None:
    actors = plan_placements(config(GPUS | {"colocated": True}))
    assert actors.bundles == (CONTROL, Resources(cpus=4, gpus=1), Resources(cpus=2.5, gpus=1))
    slots = ("coordinator", "rollout-0", "reward-0", "trainer", "rollout-1", "trainer-1")
    bundles = dict(zip(slots, (0, 1, 1, 1, 2, 2), strict=True))
    assert {name: placement.bundle for name, placement in actors.actors.items()} == bundles
    first = [actors.actors[name] for name in slots[1:4]]
    assert [one.gpus for one in first] == [0.5, 0, 0.5]
    assert [one.threads for one in first] == [2, 4, 2], "they take turns"


@pytest.mark.parametrize("cpus", [(1, 1, 1), (2, 2, 2), (0.3, 0.7, 4), (7, 11, 13)])
def test_shares_never_exceed_their_bundle(cpus: tuple[float, float, float]) -> None:
    placement = {role: {"cpus": share} for role, share in zip(("rollout", "reward", "trainer"), cpus, strict=True)}
    actors = plan_placements(config(placement | {"colocated": True}))
    for number, bundle in enumerate(actors.bundles):
        asked = sum(placement.cpus for placement in actors.actors.values() if placement.bundle == number)
        assert bundle.cpus - 0.001 < asked <= bundle.cpus


def test_names_of_workers() -> None:
    """A preference dataset has one reader and no reward workers."""
    found = names(config({}, trainer={"workers": 3}))
    assert found["rollout"] == ["rollout-0", "rollout-1"] and found["reader"] == []
    assert (found["coordinator"], found["reward"]) == (["coordinator"], ["reward-0"])
    assert found["trainer"] == ["trainer", "trainer-1", "trainer-2"]
    made = config({"rollout": {"cpus": 3}}, data={"preferences": "p.parquet"})
    found = names(made)
    assert found["reader"] == ["reader"] and found["reward"] == [] == found["rollout"]
    assert plan_placements(made).actors["reader"].cpus == 3


def test_emulated_devices_ask_for_nothing() -> None:
    actors = plan_placements(config(GPUS, emulation={"profile": "p.json"}))
    assert actors.bundles == () and actors.cpus == 0
    assert set(actors.actors) == {"coordinator", "rollout-0", "rollout-1", "reward-0", "trainer"}
    assert set(actors.actors.values()) == {ActorPlacement(None, 0.0, 0.0, 1)}


def test_the_ranks_of_a_sequence_group_are_in_one_bundle() -> None:
    trainer = {"workers": 6, "sequence_parallel": 3}
    plan = plan_placements(config(GPUS, trainer=trainer))
    assert plan.strategy == "PACK"
    ranks = ["trainer", *(f"trainer-{rank}" for rank in range(1, 6))]
    assert [plan.actors[rank].bundle for rank in ranks] == [4, 4, 4, 5, 5, 5]
    assert plan.bundles[4:] == (Resources(cpus=7.5, gpus=3),) * 2
    assert {(plan.actors[rank].cpus, plan.actors[rank].gpus) for rank in ranks} == {(2.5, 1)}, "no rank has less"
    for sequence, strategy in ((1, "PACK"), (2, "STRICT_PACK")):
        shared = config(GPUS | {"colocated": True}, trainer={"workers": 2, "sequence_parallel": sequence})
        assert plan_placements(shared).strategy == strategy, "on shared devices the job is on one machine"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one here")
def test_a_rank_with_an_accelerator_does_not_train_on_the_cpu(tmp_path) -> None:
    inputs = RunInputs(config({"trainer": {"gpus": 1}}), find_family("qwen_image"), (), ())
    rank = trainer(WorkerContext(Worker("trainer", 1), inputs, tmp_path, LocalStore()))
    said = r"placement\.trainer\.gpus: 1 asked for, but torch \S+ sees no accelerator here"
    with pytest.raises(RuntimeError, match=said):
        asyncio.run(rank.setup(None, None))


@pytest.mark.parametrize(("untouched", "wrong"), [(False, False), (True, True)])
async def test_a_scorer_that_worked_before_is_waited_for(tmp_path: Path, untouched: bool, wrong: bool) -> None:
    """Not in a resumed run, whose scorer may have been edited since."""
    start = ControlState(version=1, next_group=2, ledger=LedgerState(2, {"trained": 2, "rejected": 0, "dropped": 0}))
    inputs = dataclasses.replace(preflight(write_world(tmp_path)), start=start, untouched=untouched)
    made = coordinator(WorkerContext(Worker("coordinator"), inputs, tmp_path, LocalStore()))
    assert await made.scorer_wrong("scorer 'x': AttributeError: y") is wrong
