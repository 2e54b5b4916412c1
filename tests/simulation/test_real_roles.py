"""Holds the simulator, which is the fast path of virtual time, to the real producers, reward workers, trainer and
publisher with emulated devices on the same virtual time. Both draw the same times, so that varying ones agree too."""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from simulation_world import make_config, make_profile

from omni_async.aio.supervisor import Supervisor
from omni_async.config import Config
from omni_async.config.schedule import SCHEDULES, apply_schedule
from omni_async.config.schema import Resources, ScheduleName
from omni_async.performance.profile import Profile, write_profile
from omni_async.preflight.check import preflight
from omni_async.runtime.inprocess import InProcessCluster
from omni_async.simulation.simulate import Steady, simulate
from omni_async.simulation.virtual_time import VirtualClock, run
from omni_async.tracking.rundir import RunDirectory

UPDATES = 32
VARIED = make_profile(
    generate=(2.0, 0.5, 0.3),
    score=(0.5, 0.2, 0.4),
    train=(0.1, 0.25, 0.2),
    proximal=(0.2, 0.1, 0.2),
    step=(0.5, 0.0, 0.1),
    export=(0.6, 0.0, 0.1),
    publish=(1.5, 0.0, 0.2),
    swap=(0.3, 0.0, 0.2),
    switch=(1.0, 0.0, 0.1),
)
LONGEST_S = 1e5  # virtual: the roles' periodic flushes hide a deadlock


def job(folder: Path, profile: Profile, schedule: ScheduleName | None = "async", **changes: Any) -> Config:
    path = folder / "profile.json"
    write_profile(path, profile)
    run = {"run__dir": str(folder / "runs"), "run__runtime": "inprocess", "emulation__profile": str(path)}
    rollout = {"rollout__workers": 2, "rollout__max_batch": 8, "rollout__max_inflight": 16}
    config = make_config(**run, **{**rollout, "trainer__updates": UPDATES, **changes})
    return apply_schedule(replace(config, schedule=schedule))


def measured(config: Config) -> tuple[float, list[int]]:
    """Returns the mean seconds of a steady step, and the staleness of every group, of the real roles."""
    ends: list[float] = []
    staleness: list[int] = []

    async def play() -> None:
        clock = VirtualClock()
        cluster = InProcessCluster(preflight(config), RunDirectory.create(config, clock), clock)
        await cluster.start()
        async with Supervisor() as services, Supervisor() as workers:
            for name, work in cluster.services().items():
                services.start(name, work)
            for name, work in (cluster.work() | cluster.workers()).items():
                workers.start(name, work)
            status = None
            while status is None:
                for event in await cluster.coordinator.events():
                    if event.kind == "update":
                        ends.append(event.data["finished"])
                        staleness.extend(event.data["staleness"])
                    elif event.kind == "ended":
                        status = event.data["status"]
            assert status == "done"
            await workers.wait()

    run(asyncio.wait_for(play(), LONGEST_S))
    steady = Steady(config, UPDATES)
    return (ends[steady.last - 1] - ends[steady.first - 1]) / (steady.last - steady.first), staleness


def agree(config: Config, profile: Profile) -> None:
    step, staleness = measured(config)
    found = simulate(config, profile, updates=UPDATES, seed=config.run.seed)
    # Who asks first in one instant may differ, and so may what an engine draws for its next batch.
    assert found.step_s == pytest.approx(step, rel=0.02)
    assert max(staleness) <= config.staleness.max_updates
    assert found.staleness_mean == pytest.approx(statistics.fmean(staleness), abs=0.1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_simulator_takes_the_time_of_the_real_roles(schedule: ScheduleName, tmp_path: Path) -> None:
    agree(job(tmp_path, VARIED, schedule), VARIED)


def test_it_does_so_where_scorers_need_none_of_the_devices_that_the_others_share(tmp_path: Path) -> None:
    config = job(
        tmp_path, VARIED, "sync_colocated", placement__rollout=Resources(gpus=1), placement__trainer=Resources(gpus=1)
    )
    assert not config.placement.reward_in_turn
    agree(config, VARIED)


@pytest.mark.parametrize(
    "changes",
    [
        {"staleness__max_updates": 0},
        {"staleness__max_updates": 1, "weights__swap": "drain"},
        {"weights__swap": "request"},
        {"weights__publish_every": 3},
        {"rollout__max_batch": 3, "rollout__max_inflight": 5, "rollout__workers": 3},
        {"reward__workers": 2, "reward__batch": 3},
        {"buffer__groups": 4, "buffer__trajectories": 20},
        {"buffer__window": 4},
        {"trainer__steps_per_update": 2, "trainer__workers": 2},
        {"algorithm__correction": {"mode": "decoupled", "weights": "tempered"}},
    ],
    ids=lambda changes: ",".join(key.split("__")[1] for key in changes),
)
def test_it_does_so_with_any_other_key(changes: dict[str, Any], tmp_path: Path) -> None:
    agree(job(tmp_path, VARIED, None, **changes), VARIED)


@pytest.mark.parametrize("role", ["generate", "score", "publish"])
def test_it_does_so_whatever_holds_the_job_up(role: str, tmp_path: Path) -> None:
    slow = {"generate": (6.0, 1.0, 0.3), "score": (1.0, 1.5, 0.3), "publish": (60.0, 0.0, 0.3)}[role]
    profile = replace(VARIED, **{role: getattr(make_profile(**{role: slow}), role)})
    agree(job(tmp_path, profile), profile)
