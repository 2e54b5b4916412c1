"""Plays one day of virtual time: 1,000 engines and 200 reward workers, of which a thousand and two hundred are lost,
racks that go dark, four restarts."""

from __future__ import annotations

import sys
import time
from collections import Counter

import pytest
from chaos_job import make_config
from fleet import DAY_S, Fleet, Times

SIZE, S = 8, 2


def played(*, engines: int, scorers: int, groups: int, times: Times, end_s: float, rack: int) -> Fleet:
    config = make_config(
        rollout__workers=engines,
        rollout__group_size=SIZE,
        rollout__max_inflight=1,
        rollout__max_batch=1,
        rollout__num_inference_steps=10,
        rollout__sde={"window": {"size": 2, "range": [0, 5]}},
        rollout__retries=5,
        reward__workers=scorers,
        reward__batch=4,
        staleness__max_updates=S,
        buffer__trajectories=2 * engines + 48,
        buffer__groups=(S + 1) * groups,
        buffer__window=groups,
        trainer__updates=100_000,
        trainer__groups_per_update=groups,
        checkpoint__every=10,
    )
    assert config is not None
    began = time.perf_counter()
    fleet = Fleet(config, times=times, end_s=end_s, rack=rack).run()
    seconds = time.perf_counter() - began
    ended = Counter(line.event for line in fleet.lines)
    sys.stdout.write(
        f"{dict(fleet.seen)}, {dict(ended)}; {len(fleet.updates)} updates, {fleet.seen['samples'] / seconds:.0f}"
        f" samples/s, {seconds:.0f} s\n"
    )
    return fleet


def check(fleet: Fleet, groups: int) -> None:
    """Checks everything but the number of faults."""
    assert fleet.now >= fleet.end_s
    assert (
        fleet.seen["kill"] >= 1 and fleet.seen["rack lost"] >= 1 and fleet.seen["attempt: killed"] == fleet.seen["kill"]
    )
    numbers = sorted(line.group for line in fleet.lines)
    assert numbers == [*range(len(numbers))], "each group ended in exactly one line, over all attempts"
    by_update = Counter(line.trained_version for line in fleet.lines if line.event == "trained")
    assert set(by_update.values()) == {groups} and sorted(by_update) == [*range(1, len(by_update) + 1)]  # type: ignore[type-var]
    assert max(line.staleness for line in fleet.lines if line.staleness is not None) <= S
    unfinished = [line for line in fleet.lines if (line.reason or "").startswith("run interrupted")]
    assert len(unfinished) <= (S + 1) * groups, "at the end of the day"
    dropped = [line for line in fleet.lines if line.event == "dropped" and line not in unfinished]
    assert len(dropped) < 0.001 * len(fleet.lines), "a lost engine costs a group nothing but time"
    rejected = [line for line in fleet.lines if line.event == "rejected"]
    assert {line.reason for line in rejected} == {"zero reward variance"} and all(
        line.group % 50 == 7 for line in rejected
    )
    gaps = [later - earlier for earlier, later in zip(fleet.updates, fleet.updates[1:], strict=False)]
    assert max(gaps) < 1800, "progress: at worst a restart, and the longest hang"


def test_two_hours_of_a_hundred_engines() -> None:
    """Plays more faults for each engine and hour than in the day below."""
    hour = 3600.0
    times = Times(engine_lost_s=hour / 40, scorer_lost_s=hour / 10, rack_lost_s=hour / 2, killed_s=hour / 2)
    fleet = played(engines=100, scorers=20, groups=8, times=times, end_s=2 * hour, rack=10)
    check(fleet, 8)
    assert fleet.seen["engine lost"] > 40 and fleet.seen["scorer lost"] > 5


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_one_day_of_a_thousand_engines() -> None:
    fleet = played(engines=1000, scorers=200, groups=64, times=Times(), end_s=DAY_S, rack=100)
    check(fleet, 64)
    assert fleet.seen["engine lost"] > 800 and fleet.seen["scorer lost"] > 120 and fleet.seen["late answer"] > 100
