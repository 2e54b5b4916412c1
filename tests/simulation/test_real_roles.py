"""Holds the simulator, which is the fast path of virtual time, to the real producers, reward workers, trainer and
publisher with emulated devices on the same virtual time. Both draw the same times, so that varying ones agree too."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from omni_async.config.schedule import SCHEDULES, apply_schedule
from omni_async.performance.profile import write_profile
from omni_async.simulation.simulate import Steady, simulate
from tests.simulation.simulation_world import make_config, make_profile
from tests.support.job_world import emulate

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
SLOW = make_profile(generate=(6.0, 1.0, 0.3), score=(1.0, 1.5, 0.3), publish=(60.0, 0.0, 0.3))
GPUS = {"placement.rollout": {"gpus": 1}, "placement.trainer": {"gpus": 1}}  # scorers need none of what those share
JOBS: dict[str, dict[str, Any]] = {
    **{f"schedule: {name}": {"schedule": name} for name in SCHEDULES},
    "sync_colocated, scorers aside": {"schedule": "sync_colocated", **GPUS},
    "in step": {"staleness.max_updates": 0},
    "drain": {"staleness.max_updates": 1, "weights.swap": "drain"},
    "request": {"weights.swap": "request"},
    "every third version": {"weights.publish_every": 3},
    "small batches": {"rollout.max_batch": 3, "rollout.max_inflight": 5, "rollout.workers": 3},
    "small batches of scores": {"reward.workers": 2, "reward.batch": 3},
    "small buffers": {"buffer.groups": 4, "buffer.trajectories": 20},
    "window": {"buffer.window": 4},
    "two steps, two ranks": {"trainer.steps_per_update": 2, "trainer.workers": 2},
    "proximal": {"algorithm.correction": {"mode": "decoupled", "weights": "tempered"}},
    **{f"slow to {stage}": {"schedule": "async", "slow": stage} for stage in ("generate", "score", "publish")},
}


VARYING = [name for name in JOBS if name.startswith(("schedule", "slow"))]


@pytest.mark.parametrize(
    ("name", "varies"), [*((name, False) for name in JOBS), *((name, True) for name in VARYING)], ids=str
)
def test_the_simulator_takes_the_time_of_the_real_roles(name: str, varies: bool, tmp_path: Path) -> None:
    """Demands the same to the last digit where times do not vary. Where they do, who asks first in one instant may
    differ, and so may what an engine draws for its next batch."""
    changes = {"rollout.workers": 2, "rollout.max_batch": 8, "rollout.max_inflight": 16, **JOBS[name]}
    schedule, slow = changes.pop("schedule", None), changes.pop("slow", None)
    profile = VARIED if slow is None else replace(VARIED, **{slow: getattr(SLOW, slow)})
    if not varies:
        profile = replace(profile, **{stage: replace(time, cv=0.0) for stage, time in profile.stages().items()})
    write_profile(path := tmp_path / "profile.json", profile)
    own = {"run.dir": str(tmp_path), "run.runtime": "inprocess", "emulation.profile": str(path)}
    config = apply_schedule(replace(make_config(**own, **{"trainer.updates": UPDATES}, **changes), schedule=schedule))
    assert config.placement.reward_in_turn == (name == "schedule: sync_colocated")

    made, steady = emulate(config, folder=tmp_path / "run"), Steady(config, UPDATES)
    staleness = [age for update in made.updates for age in update["staleness"]]
    assert max(staleness) <= config.staleness.max_updates
    found = simulate(config, profile, updates=UPDATES, seed=config.run.seed)
    step = statistics.fmean(made.steps(steady.first, steady.last))
    assert found.step_s == pytest.approx(step, rel=0.02 if varies else 1e-9)
    assert found.staleness_mean == pytest.approx(statistics.fmean(staleness), abs=0.1 if varies else 1e-9)
