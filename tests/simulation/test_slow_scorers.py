"""Tests in virtual time what slow scorers cost: the real roles with emulated devices, and the simulator beside them."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from omni_async.performance.profile import Profile, ScorerTime, ServiceTime, write_profile
from omni_async.simulation.simulate import Steady, simulate
from tests.simulation.simulation_world import make_config, make_profile
from tests.support.job_world import Emulated, emulate

UPDATES = 40
# 48 samples an update, which the trainer takes 8 s for and two engines about 6.
SHAPE = {
    "rollout.workers": 2,
    "rollout.group_size": 8,
    "rollout.max_batch": 8,
    "rollout.max_inflight": 16,
    "trainer.groups_per_update": 6,
    "trainer.updates": UPDATES,
    "staleness.max_updates": 2,
    "buffer.window": 4,
}
# No multiple of the second after which workers report.
TIMES = {"generate": (0.53, 0.181), "train": (8 / 6,)}
# A mean of 3 s with a long tail: one answer in a hundred takes 12 s or longer.
TAIL = (0.6,) * 30 + (1.0,) * 12 + (1.7,) * 6 + (3.4,) + (4.4,)


def played(folder: Path, profile: Profile, **changes: Any) -> tuple[Any, Emulated]:
    folder.mkdir()
    write_profile(path := folder / "profile.json", profile)
    own = {"run.dir": str(folder), "run.runtime": "inprocess", "emulation.profile": str(path)}
    config = make_config(**own, **SHAPE, **changes)
    return config, emulate(config, folder=folder / "run")


def step_s(config: Any, made: Emulated) -> float:
    steady = Steady(config, UPDATES)
    return statistics.fmean(made.steps(steady.first, steady.last))


def judge(mean_s: float, concurrency: int | None = None, quantiles: tuple[float, ...] = ()) -> ScorerTime:
    mean = statistics.fmean(quantiles) if quantiles else 1.0
    return ScorerTime(ServiceTime(fixed_s=mean_s, quantiles=tuple(f / mean for f in quantiles)), concurrency)


def test_a_judge_of_3_seconds_that_may_be_asked_any_number_of_times_costs_nothing_and_littles_law_holds(tmp_path: Path):
    fast = make_profile(score=0.0, **TIMES)
    slow = replace(fast, scorers={"judge": judge(3.0, quantiles=TAIL)})
    scorers = {"reward.scorers": [{"name": "judge"}]}
    base = step_s(*played(tmp_path / "fast", fast, **scorers))
    config, made = played(tmp_path / "slow", slow, **scorers)
    assert base == pytest.approx(8.0, rel=0.01)
    assert step_s(config, made) < 1.05 * base
    steady = made.updates[10:]
    in_flight = statistics.fmean(update["scorers"]["judge"]["in_flight"] for update in steady)
    seconds = steady[-1]["finished"] - steady[0]["finished"]
    samples = sum(update["scorers"]["judge"]["samples"] for update in steady[1:])
    calls = [span.end - span.start for span in made.spans if span.kind == "score"]
    assert max(calls) > 12
    assert in_flight == pytest.approx(samples / seconds * statistics.fmean(calls), rel=0.1)


def test_scorers_of_1_2_and_4_seconds_take_4_for_every_sample(tmp_path: Path):
    times = {name: judge(seconds) for name, seconds in (("one", 1.0), ("two", 2.0), ("four", 4.0))}
    profile = replace(make_profile(score=0.0, **TIMES), scorers=times)
    _, made = played(tmp_path / "run", profile, **{"reward.scorers": [{"name": name} for name in times]})
    ends: dict[tuple[float, str], float] = {}
    for span in made.spans:
        if span.kind == "score":
            ends[span.start, span.args["scorer"]] = round(span.end - span.start, 6)
    starts = {start for start, _ in ends}
    assert starts and all({ends[start, name] for name in times} == {1.0, 2.0, 4.0} for start in starts), "side by side"


SEVERAL: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "side by side": ([{"name": "one"}, {"name": "two"}, {"name": "four"}], []),
    "one of them is the bottleneck": ([{"name": "one"}, {"name": "two", "concurrency": 2, "batch": 2}], []),
    "several calls": ([{"name": "four", "concurrency": 20, "batch": 2}], []),
    "a pool": (
        [{"name": "one"}, {"name": "two", "pool": "judges", "concurrency": 4}],
        [{"name": "judges", "workers": 3}],
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_the_simulator_and_the_law_know_several_scorers_and_their_pools(name: str, tmp_path: Path):
    scorers, pools = SEVERAL[name]
    times = {name: judge(seconds) for name, seconds in (("one", 1.0), ("two", 2.0), ("four", 4.0))}
    profile = replace(make_profile(score=0.0, **TIMES), scorers=times)
    config, made = played(tmp_path / "run", profile, **{"reward.scorers": scorers, "reward.pools": pools})
    found = simulate(config, profile, updates=UPDATES, seed=config.run.seed)
    assert found.step_s == pytest.approx(step_s(config, made), rel=1e-9)
