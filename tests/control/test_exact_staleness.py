"""Tests `staleness.exact`: nothing is trained while anything could still be generated, so every age is the budget."""

from __future__ import annotations

import asyncio

import pytest
from control_world import Bench, distinct, hold, make_config, now, play

from omni_async.types import ReadyGroup, ScoreJob


def taken(bench: Bench) -> ReadyGroup:
    group = bench.take()
    assert group is not None
    return group


@pytest.mark.parametrize("S", [0, 1, 3])
@pytest.mark.parametrize("P", [1, 2])
@pytest.mark.parametrize("window", [1, 4])
def test_after_the_first_s_updates_every_group_is_exactly_s_old(S: int, P: int, window: int) -> None:
    """Ages climb 0, 1, ..., S, because all that the first S + 1 updates train is admitted under version 0."""
    config = make_config(S=S, P=P, updates=S + 5, window=window, engines=2, exact=True)
    for seed in range(3):
        run = play(config, seed=seed, pause={"generate": 9, "publish": 9})
        assert run.outcome == ("done", None)
        assert run.staleness == [min(version, S) for version in range(S + 5) for _ in range(P)]


def test_without_it_the_same_run_is_of_mixed_ages() -> None:
    run = play(make_config(S=3, P=2, updates=8, engines=2), pause={"generate": 9, "publish": 9})
    assert run.staleness != [min(version, 3) for version in range(8) for _ in range(2)]


def test_a_resumed_run_climbs_to_the_budget_again() -> None:
    run = play(make_config(S=2, P=1, updates=9, exact=True), start_version=4, start_group=12)
    assert run.staleness == [0, 1, 2, 2, 2]


def test_rejected_groups_are_replaced_before_anything_is_trained() -> None:
    """Checks that a replacement is as old as what it replaces, whatever is rejected when."""

    def reward(job: ScoreJob) -> float:
        return 0.5 if int(job.sample_id[1:].split(".")[0]) % 3 == 1 else distinct(job)

    run = play(make_config(S=2, P=2, updates=7, engines=2, exact=True), reward=reward, seed=4)
    assert run.outcome == ("done", None)
    assert any(entry.event == "rejected" for entry in run.entries)
    assert run.staleness == [min(version, 2) for version in range(7) for _ in range(2)]


async def test_nothing_is_taken_while_an_admitted_group_is_not_ready() -> None:
    bench = Bench(S=1, P=1, updates=9, exact=True)
    await bench.generate(0, 0)
    assert bench.take() is None
    await bench.generate(1, 0)
    assert taken(bench).group == 0


async def test_nothing_is_taken_before_the_newest_version_is_held() -> None:
    bench = Bench(S=1, P=1, updates=9, exact=True)
    for group in (0, 1):
        await bench.generate(group, 0)
    await bench.train(taken(bench))
    assert bench.take() is None, "group 1 is ready, but version 1 is not everywhere yet, and will admit another group"
    await hold(bench.c, 1)
    assert bench.take() is None, "group 2 was admitted, and is not made yet"
    await bench.generate(2, 1)
    second = taken(bench)
    assert (second.group, bench.version - second.oldest_version) == (1, 1)


async def test_a_trainer_that_waits_for_the_newest_version_is_woken_by_it() -> None:
    """Waits at the end of a run, where nothing more is admitted, so no score will come that could wake it."""
    bench = Bench(S=1, P=1, updates=2, exact=True)
    for group in (0, 1):
        await bench.generate(group, 0)
    await bench.train(taken(bench))
    waiting = asyncio.create_task(bench.c.next_groups(1, 1))
    await asyncio.sleep(0)
    assert not waiting.done()
    await hold(bench.c, 1)
    assert now(bench.c.continuation()).next_group == 2, "two updates want two groups"
    async with asyncio.timeout(1):
        (group,) = await waiting
    assert group.group == 1


async def test_a_trainer_that_waits_for_a_group_that_is_rejected_waits_for_its_replacement() -> None:
    bench = Bench(S=1, P=1, updates=2, exact=True)
    await bench.generate(1, 0)
    waiting = asyncio.create_task(bench.c.next_groups(0, 1))
    await asyncio.sleep(0)
    await bench.generate(0, 0, reward=lambda job: 0.5)
    assert not waiting.done(), "group 2 replaces group 0"
    await bench.generate(2, 0)
    async with asyncio.timeout(1):
        (group,) = await waiting
    assert group.group == 1
