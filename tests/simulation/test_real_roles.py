"""Holds the simulator to the real roles with emulated devices on the same virtual time; both draw the same times."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from omni_async.config.schedule import SCHEDULES, apply_schedule
from omni_async.performance.profile import Profile, ScorerTime, ServiceTime, write_profile
from omni_async.simulation.simulate import Steady, simulate
from tests.simulation.simulation_world import make_config, make_profile
from tests.support.job_world import Emulated, emulate

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
SECONDS = {"one": 1.0, "two": 2.0, "four": 4.0}
POOL = {"reward.pools": [{"name": "judges", "workers": 3}]}
JOBS |= {
    "scorers side by side": {"reward.scorers": [{"name": name} for name in SECONDS]},
    "a slow scorer": {"reward.scorers": [{"name": "one"}, {"name": "two", "concurrency": 2, "batch": 2}]},
    "several calls": {"reward.scorers": [{"name": "four", "concurrency": 20, "batch": 2}]},
    "a pool": {"reward.scorers": [{"name": "one"}, {"name": "two", "pool": "judges", "concurrency": 4}], **POOL},
}
VARYING = [name for name in JOBS if name.startswith(("schedule", "slow"))]


def played(folder: Path, profile: Profile, schedule: str | None = None, **changes: Any) -> Emulated:
    folder.mkdir(exist_ok=True)
    write_profile(path := folder / "profile.json", profile)
    own = {"run.dir": str(folder), "run.runtime": "inprocess", "emulation.profile": str(path)}
    config = make_config(**own, **{"trainer.updates": UPDATES} | changes)
    return emulate(apply_schedule(replace(config, schedule=schedule)), folder=folder / "run")


def step_s(made: Emulated) -> float:
    steady = Steady(made.config, made.config.trainer.updates)
    return statistics.fmean(made.steps(steady.first, steady.last))


@pytest.mark.sliced(floor=8)
@pytest.mark.parametrize(
    ("name", "varies"), [*((name, False) for name in JOBS), *((name, True) for name in VARYING)], ids=str
)
def test_the_simulator_takes_the_time_of_the_real_roles(name: str, varies: bool, tmp_path: Path) -> None:
    """Demands the same times to the last digit, and staleness to a sample, because the order within an instant may
    differ; where times vary, more may."""
    changes = {"rollout.workers": 2, "rollout.max_batch": 8, "rollout.max_inflight": 16, **JOBS[name]}
    slow = changes.pop("slow", None)
    profile = VARIED if slow is None else replace(VARIED, **{slow: getattr(SLOW, slow)})
    if not varies:
        profile = replace(profile, **{stage: replace(time, cv=0.0) for stage, time in profile.stages().items()})
    if "reward.scorers" in changes:
        times = {name: ScorerTime(ServiceTime(fixed_s=seconds), None) for name, seconds in SECONDS.items()}
        profile = replace(profile, scorers=times)
    made = played(tmp_path, profile, **changes)
    config = made.config
    assert config.placement.reward_in_turn == (name == "schedule: sync_colocated")

    staleness = [age for update in made.updates for age in update["staleness"]]
    assert max(staleness) <= config.staleness.max_updates
    found = simulate(config, profile, updates=UPDATES, seed=config.run.seed)
    assert found.step_s == pytest.approx(step_s(made), rel=0.02 if varies else 1e-9)
    assert found.staleness_mean == pytest.approx(statistics.fmean(staleness), abs=0.1 if varies else 0.01)


# A mean of 3 s with a long tail: one answer in a hundred takes 12 s or longer.
TAIL = (0.6,) * 30 + (1.0,) * 12 + (1.7,) * 6 + (3.4,) + (4.4,)


def test_a_judge_of_3_seconds_that_may_be_asked_any_number_of_times_costs_nothing(tmp_path: Path) -> None:
    """48 samples an update, for which the trainer takes 8 s and two engines about 6; Little's law holds."""
    shape = {"rollout.workers": 2, "rollout.group_size": 8, "rollout.max_batch": 8, "rollout.max_inflight": 16}
    shape |= {"trainer.updates": 40, "trainer.groups_per_update": 6, "staleness.max_updates": 2, "buffer.window": 4}
    judged = {"reward.scorers": [{"name": "judge"}]}
    fast = make_profile(score=0.0, generate=(0.53, 0.181), train=(8 / 6,))
    quantiles = tuple(factor / statistics.fmean(TAIL) for factor in TAIL)
    slow = replace(fast, scorers={"judge": ScorerTime(ServiceTime(fixed_s=3.0, quantiles=quantiles), None)})
    base = step_s(played(tmp_path / "fast", fast, **shape, **judged))
    made = played(tmp_path / "slow", slow, **shape, **judged)
    assert base == pytest.approx(8.0, rel=0.01)
    assert step_s(made) < 1.05 * base
    steady = made.updates[10:]
    in_flight = statistics.fmean(update["scorers"]["judge"]["in_flight"] for update in steady)
    seconds = steady[-1]["finished"] - steady[0]["finished"]
    samples = sum(update["scorers"]["judge"]["samples"] for update in steady[1:])
    calls = [span.end - span.start for span in made.spans if span.kind == "score"]
    assert max(calls) > 12
    assert in_flight == pytest.approx(samples / seconds * statistics.fmean(calls), rel=0.1)
