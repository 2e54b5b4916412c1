"""Tests that lost workers are replaced, not too often, and not when the run is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from omni_async.aio.supervisor import Supervisor, TaskFailed
from omni_async.config.role_table import BUILT_IN
from omni_async.records.write.attempts import Fault
from omni_async.runtime.cluster import PeerLost
from omni_async.runtime.keeper import Keeper, Restarts, Work
from omni_async.simulation.virtual_time import VirtualClock

pytestmark = pytest.mark.virtual_time


class Team:
    """The part of a cluster that a keeper uses; its workers work until the test fails, ends or drains them."""

    def __init__(self, start_s: float = 5.0) -> None:
        self.start_s = start_s
        self.at_work: dict[str, asyncio.Future[None]] = {}
        self.lost: list[tuple[str, str]] = []
        self.started: list[str] = []
        self.refuse: list[Exception] = []
        self.linger: set[str] = set()  # those that do not end at once
        self.drained: set[str] = set()
        self.remove_s = 0.0

    async def work(self, name: str) -> None:
        if name in self.drained:
            return
        self.at_work[name] = asyncio.get_running_loop().create_future()
        try:
            await self.at_work[name]
        finally:
            del self.at_work[name]

    def kill(self, name: str, why: str = "killed") -> None:
        self.at_work[name].set_exception(PeerLost(f"{name}: {why}"))

    def evict(self, name: str) -> None:
        self.at_work[name].set_result(None)

    async def remove_worker(self, name: str, reason: str) -> None:
        await asyncio.sleep(self.remove_s)
        self.lost.append((name, reason))

    async def start_worker(self, name: str) -> Work:
        await asyncio.sleep(self.start_s)
        if self.refuse:
            raise self.refuse.pop(0)
        self.started.append(name)
        return self.work(name)

    async def drain_worker(self, name: str) -> None:
        if name not in self.linger:
            self.drained.add(name)
            if name in self.at_work:
                self.evict(name)


class World:
    def __init__(self, restarts: int, team: Team, supervisor: Supervisor) -> None:
        self.team, clock = team, VirtualClock()
        self.faults: list[Fault] = []
        self.said: list[str] = []
        table, counted = {spec.role: spec for spec in BUILT_IN}, Restarts(restarts, clock)
        self.keeper = Keeper(team, supervisor, counted, clock, self.said.append, self.faults.append, table)

    async def lose(self, name: str, why: str = "killed", wait_s: float = 10.0) -> None:
        self.team.kill(name, why)
        await asyncio.sleep(wait_s)

    async def scale(self, role: str, count: int, wait_s: float = 100.0) -> list[str]:
        """Returns the role's workers a while later."""
        await self.keeper.scale(role, count)
        await asyncio.sleep(wait_s)
        return self.keeper.workers(role)


@asynccontextmanager
async def keeping(restarts: int = 5, team: Team | None = None) -> AsyncIterator[World]:
    """Keeps two engines and a reward worker; then the run closes. Raises what ends it before."""
    async with Supervisor() as supervisor:
        world = World(restarts, team or Team(), supervisor)
        for name in ("rollout-0", "rollout-1", "reward-0"):
            world.keeper.employ(name, world.team.work(name))
        await asyncio.sleep(1)
        yield world
        await asyncio.sleep(0.1)  # those that were added begin
        world.keeper.stop_replacing()
        for name in [*world.team.at_work]:
            world.team.evict(name)
        await supervisor.wait()


async def test_a_lost_worker_is_replaced_under_another_name() -> None:
    async with keeping() as world:
        await world.lose("rollout-1", "end of file")
        await world.lose("rollout-1.2", wait_s=60)
        assert sorted(world.team.at_work) == ["reward-0", "rollout-0", "rollout-1.3"]
    assert world.team.lost == [("rollout-1", "rollout-1: end of file"), ("rollout-1.2", "rollout-1.2: killed")]
    assert [(fault.part, fault.replacement, fault.seconds) for fault in world.faults] == [
        ("rollout-1", "rollout-1.2", 5.0),
        ("rollout-1.2", "rollout-1.3", 6.0),  # a second loss within a minute waits first
    ]
    assert world.said[::2] == [
        "rollout-1 was lost (rollout-1: end of file); starting rollout-1.2",
        "rollout-1.2 in slot rollout-1 was lost (rollout-1.2: killed); starting rollout-1.3 in 1 s",
    ]


@pytest.mark.parametrize("evicted_before", [False, True])
async def test_a_worker_that_is_given_up_is_ended_and_replaced(evicted_before: bool) -> None:
    """The driver may learn of it after the coordinator has evicted the engine."""
    async with keeping() as world:
        if evicted_before:
            world.team.evict("rollout-0")
            await asyncio.sleep(10)
            assert world.team.started == []
        world.keeper.give_up("rollout-0", "it did not take version 3")
        await asyncio.sleep(10)
        assert world.team.started == ["rollout-0.2"]
        assert "rollout-0.2" in world.team.at_work and "rollout-0" not in world.team.at_work
    assert world.team.lost == [("rollout-0", "it did not take version 3")]


@pytest.mark.parametrize("fails", [False, True])
async def test_the_end_of_a_run_is_no_loss(fails: bool) -> None:
    async with keeping() as world:
        if fails:
            world.keeper.stop_replacing()
            await world.lose("rollout-0")
        else:
            world.team.evict("rollout-0")
            await asyncio.sleep(1)
    assert not world.team.lost and not world.team.started and not world.faults


@pytest.mark.parametrize(
    ("restarts", "said"), [(2, "after it had been replaced 2 times within the hour"), (0, "and run.restarts is 0")]
)
async def test_too_many_losses_in_one_slot_within_an_hour_end_the_run(restarts: int, said: str) -> None:
    with pytest.raises(TaskFailed, match=f"reward-0 was lost .* {said}"):
        async with keeping(restarts) as world:
            for name in ("reward-0", "reward-0.2", "reward-0.3")[: restarts + 1]:
                await world.lose(name, wait_s=100)


async def test_losses_count_for_an_hour_and_by_slot() -> None:
    async with keeping(restarts=1) as world:
        for suffix in ("", ".2", ".3", ".4", ".5"):
            world.team.kill(f"rollout-0{suffix}")
            await world.lose(f"rollout-1{suffix}", wait_s=3601)


async def test_a_replacement_that_does_not_start_is_tried_again() -> None:
    async with keeping() as world:
        world.team.refuse = [ValueError("no room")] * 3
        await world.lose("rollout-0", wait_s=100)
        assert "rollout-0.5" in world.team.at_work
    assert world.faults[0].seconds == 4 * 5.0 + 1 + 2 + 4
    said = "rollout-0 was lost (its replacement did not start: ValueError: no room); starting rollout-0.4 in 2 s"
    assert said in world.said


async def test_workers_are_added_and_leave_when_they_have_finished() -> None:
    async with keeping() as world:
        assert await world.scale("rollout", 4) == ["rollout-0", "rollout-1", "rollout-2", "rollout-3"]
        await world.lose("rollout-3")  # it is kept as the others are
        assert "rollout-3.2" in world.team.at_work
        assert await world.scale("rollout", 1) == ["rollout-0"]
        assert sorted(world.team.at_work) == ["reward-0", "rollout-0"]
        assert await world.scale("rollout", 2) == ["rollout-0", "rollout-1.2"], "a name is never used again"
    assert {name for name, _ in world.team.lost} == {"rollout-1", "rollout-2", "rollout-3", "rollout-3.2"}


async def test_a_change_of_workers_reports_its_progress() -> None:
    async with keeping() as world:
        lines: list[tuple[float, str]] = []
        clock = asyncio.get_running_loop().time
        began = clock()
        tell = lambda text: lines.append((clock() - began, text))  # noqa: E731
        await world.keeper.scale("rollout", 3, tell)
        await world.keeper.scale("rollout", 3, tell)
        await asyncio.sleep(1)
        await world.keeper.scale("rollout", 2, tell)
        await world.keeper.scale("reward", 2, tell)
        assert lines == [
            (0.0, "rollout-2: loading its model; it gets work once it holds the newest weights"),
            (5.0, "rollout-2: at work"),
            (5.0, "rollout: there are 3 already"),
            (6.0, "rollout-2: gets no more work, and leaves when it has finished what it has"),
            (6.0, "reward-1: loading its scorers"),
            (11.0, "reward-1: at work"),
        ]


async def test_changes_of_workers_wait_for_each_other_or_change_nothing() -> None:
    async with keeping() as world:
        lines: list[str] = []
        await asyncio.gather(world.keeper.scale("rollout", 3), world.keeper.scale("rollout", 2, lines.append))
        assert lines == [
            "rollout: waiting for a change of workers that was asked for before",
            "rollout-2: gets no more work, and leaves when it has finished what it has",
        ]
        world.team.refuse = [ValueError("it did not join")]
        with pytest.raises(ValueError, match="join"):
            await world.keeper.scale("reward", 2)
        assert world.keeper.workers("reward") == ["reward-0"]
        world.keeper.give_up("reward-1", "it did not join")  # a late report, after which its name is not used again
        assert await world.scale("reward", 2) == ["reward-0", "reward-1.2"] and not world.faults


async def test_an_added_worker_that_dies_of_the_end_of_the_run() -> None:
    async with keeping() as world:
        scaling = asyncio.ensure_future(world.keeper.scale("rollout", 3))
        await asyncio.sleep(world.team.start_s / 2)
        world.team.refuse = [PeerLost("rollout-2 is gone: the actor died")]
        world.keeper.stop_replacing()
        with pytest.raises(ValueError, match="the run is ending"):
            await scaling


async def test_a_leaving_worker_is_neither_replaced_nor_counted() -> None:
    async with keeping(restarts=0) as world:
        world.team.linger = {"rollout-1"}
        await world.keeper.scale("rollout", 1)
        world.keeper.give_up("rollout-1", "it did not take version 3")
        await asyncio.sleep(100)
        assert not world.team.started and world.keeper.workers("rollout") == ["rollout-0"]
    async with keeping(restarts=0) as world:
        world.team.remove_s = 5.0
        await world.lose("rollout-1", wait_s=1)
        assert await world.scale("rollout", 1) == ["rollout-0"] and not world.team.started


@pytest.mark.parametrize("after", [0.5, 3.0, 7.0])
async def test_a_worker_that_is_no_longer_needed_while_it_is_replaced(after: float) -> None:
    """Covers the pause before the start, the start itself, and the time after it."""
    async with keeping() as world:
        await world.lose("rollout-1")
        # The second loss within a minute: a second's pause, then five to start.
        await world.lose("rollout-1.2", wait_s=after)
        assert await world.scale("rollout", 1) == ["rollout-0"]
        assert sorted(world.team.at_work) == ["reward-0", "rollout-0"]
        assert len(await world.scale("rollout", 2)) == 2


async def test_replacements_that_never_start_end_the_run() -> None:
    said = "rollout-0 cannot be replaced, its replacement did not start: ValueError: no room"
    with pytest.raises(TaskFailed, match=said):
        async with keeping(restarts=1000) as world:
            world.team.refuse = [ValueError("no room")] * 100
            await world.lose("rollout-0", wait_s=1e6)


async def test_a_start_cut_off_by_the_end_of_the_run_is_not_tried_again() -> None:

    class Complaining(Team):
        async def start_worker(self, name: str) -> Work:
            self.started.append(name)
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                raise PeerLost("trainer is gone") from None
            raise AssertionError("unreachable")

    async with keeping(team=Complaining()) as world:
        await world.lose("rollout-0")
    assert world.team.started == ["rollout-0.2"]
