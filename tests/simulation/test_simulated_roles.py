"""Tests engines, reward workers, publishers and shared devices of the simulator, each alone, against times worked
out by hand."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from simulation_world import FakeCoordinator, make_config, make_profile, make_world, request

from omni_async.performance.emulation import Draws
from omni_async.performance.profile import Profile
from omni_async.simulation.simulated_roles import Batch, SimulatedEngine, SimulatedPublisher, reward_worker
from omni_async.simulation.world import SharedDevices, at_once
from omni_async.types import Prompt, ScoreJob, SdeWindow

pytestmark = pytest.mark.virtual_time
WINDOW = SdeWindow(2, 4)
# A batch takes 10 seconds however large it is: a second for each denoising step.
PROFILE = make_profile(generate=10.0, swap=0.5, publish=2.0)


class Alone:
    """An engine `rollout-0` that leases from a coordinator of the test; `until` a time, which ends the run."""

    def __init__(self, profile: Profile = PROFILE, **changes: Any) -> None:
        self.coordinator = FakeCoordinator()
        config = make_config(**{"rollout__max_batch": 4, "rollout__max_inflight": 8, **changes})
        self.world = make_world(config, profile, self.coordinator)
        self.engine = SimulatedEngine("rollout-0", self.world, lambda: None)
        self.offer, self.at, self.stage = self.coordinator.offer, self.world.loop.sleep_until, self.engine.stage
        self._leasing = asyncio.create_task(self.engine.lease())

    async def until(self, when: float) -> dict[float, int]:
        """Returns how many samples were done at which times."""
        await self.at(when)
        self.coordinator.end()
        await self._leasing
        return dict(Counter(time for time, _ in self.coordinator.done))

    def versions(self) -> list[int]:
        return [result.step_versions.first for _, result in self.coordinator.done]


def samples(count: int, first: int = 0) -> list[Any]:
    return [request(first + number, WINDOW) for number in range(count)]


# ---- batches ---------------------------------------------------------------------------------------------------------


async def test_an_engine_makes_one_batch_after_the_other_and_all_samples_of_a_batch_at_once() -> None:
    alone = Alone()
    alone.offer(*samples(10))
    assert await alone.until(35) == {10: 4, 20: 4, 30: 2}


async def test_a_batch_takes_what_waits_and_its_time_depends_on_that() -> None:
    alone = Alone(make_profile(generate=(1.0, 2.0)))
    alone.offer(*samples(3))
    await alone.at(1)
    alone.offer(*samples(6, first=3))
    # 3 samples: 1 + 6 s; then 4 of those that came meanwhile, and the rest.
    assert await alone.until(100) == {7: 3, 16: 4, 21: 2}


async def test_what_is_offered_in_one_instant_is_one_batch_in_whatever_pieces_it_comes() -> None:
    alone = Alone()
    for number in range(4):
        alone.offer(*samples(1, first=number))
        await asyncio.sleep(0)
    assert await alone.until(15) == {10: 4}


async def test_an_engine_never_holds_more_than_it_may() -> None:
    alone = Alone(rollout__max_inflight=3)
    alone.offer(*samples(9))
    assert await alone.until(35) == {10: 3, 20: 3, 30: 3}
    assert alone.world.meters.reserved["trajectories"].largest == 9  # nothing is scored, so no slot is freed


# ---- swaps -----------------------------------------------------------------------------------------------------------


async def test_swap_step_takes_effect_at_the_next_step_and_makes_the_batch_late_by_the_pause() -> None:
    alone = Alone()
    assert alone.stage(0) == 0.5
    alone.offer(*samples(2))
    await alone.at(4.0)  # the batch began at 0.5, after the pause
    assert alone.stage(1) == pytest.approx(5.0)  # step 4 begins at 4.5
    assert await alone.until(20) == {11.0: 2}
    assert [(r.version, tuple(r.step_versions)) for _, r in alone.coordinator.done] == [(0, (0, 0, 1, 1))] * 2


async def test_a_version_that_comes_before_the_first_step_makes_the_whole_sample() -> None:
    alone = Alone()
    alone.stage(0)
    alone.offer(*samples(1))
    await alone.at(0.5)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert alone.stage(1) == 1.0
    assert await alone.until(20) == {11.0: 1}
    ((_, result),) = alone.coordinator.done
    assert (result.version, tuple(result.step_versions)) == (1, (1, 1, 1, 1))


async def test_a_version_that_comes_during_the_last_step_waits_for_the_end_and_holds_up_the_next_batch() -> None:
    alone = Alone()
    alone.stage(0)
    alone.offer(*samples(5))
    await alone.at(10.2)
    assert alone.stage(1) == pytest.approx(11.0)
    assert await alone.until(30) == {10.5: 4, 21.0: 1}
    assert alone.versions() == [0, 0, 0, 0, 1]


def test_two_versions_in_one_batch() -> None:
    batch = Batch([], start=0.0, seconds=10.0, steps=10, version=3)
    assert tuple(batch.versions(WINDOW)) == (3, 3, 3, 3)
    batch.swap(batch.next_boundary(2.4), 4, pause=0.5)  # before step 3
    batch.swap(batch.next_boundary(4.6), 5, pause=0.5)  # 4.6 is 4.1 seconds of work: before step 5
    assert tuple(batch.versions(WINDOW)) == (3, 4, 4, 5)
    assert tuple(batch.versions(None)) == (3, 3, 3, 4, 4, 5, 5, 5, 5, 5)
    assert batch.end == 11.0


def test_a_batch_without_duration_has_no_boundary_but_its_end() -> None:
    assert Batch([], start=1.0, seconds=0.0, steps=10, version=0).next_boundary(1.0) == 10


@pytest.mark.parametrize(
    ("mode", "offered", "done", "held", "old"),
    [
        # Finishes what it has, its next batch included; what it held at first was nothing, so that swap was at once.
        ("request", 6, {10.5: 4, 21.0: 2}, [(11.0, 1)], 4),
        # Finishes all that is leased, and leases nothing meanwhile.
        ("drain", 12, {10.5: 4, 20.5: 4, 31.0: 4}, [(0.5, 0), (21.0, 1)], 8),
    ],
)
async def test_a_swap_waits_for_what_its_mode_says_and_nothing_more(
    mode: str, offered: int, done: dict[float, int], held: list[tuple[float, int]], old: int
) -> None:
    alone = Alone(weights__swap=mode)
    assert alone.stage(0) == (0.5 if mode == "request" else None)
    alone.offer(*samples(offered))
    await alone.at(3.0)
    assert alone.stage(1) is None
    assert await alone.until(60) == done
    assert alone.coordinator.held == [(time, "rollout-0", version) for time, version in held]
    assert alone.versions() == [0] * old + [1] * (offered - old)


@pytest.mark.parametrize("mode", ["step", "request", "drain"])
async def test_an_idle_engine_swaps_at_once(mode: str) -> None:
    alone = Alone(weights__swap=mode)
    await alone.at(7)
    # One that drains leases nothing while it swaps, and reports by itself.
    assert alone.stage(4) == (None if mode == "drain" else 7.5)
    await alone.until(8)
    assert alone.coordinator.held == ([(7.5, "rollout-0", 4)] if mode == "drain" else [])


# ---- publisher -------------------------------------------------------------------------------------------------------


async def publish(versions: dict[float, int], engines: int = 2) -> FakeCoordinator:
    """Runs idle engines, and versions that the trainer hands over at these times; negative ones are withdrawn."""
    coordinator = FakeCoordinator()
    world = make_world(make_config(rollout__workers=engines, trainer__updates=9), PROFILE, coordinator)
    publisher = SimulatedPublisher(world)
    receivers = [SimulatedEngine(f"rollout-{number}", world, publisher.swapped) for number in range(engines)]
    delivering = asyncio.create_task(publisher.run(receivers))
    for time, version in versions.items():
        await world.loop.sleep_until(time)
        publisher.publish(abs(version))
        if version < 0:
            publisher.withdraw()
    await delivering
    return coordinator


async def test_a_version_reaches_every_engine_after_the_publish_and_the_pause() -> None:
    coordinator = await publish({1.0: 9})
    assert coordinator.announced == [(1.0, 9)]
    assert coordinator.held == [(3.5, "rollout-0", 9), (3.5, "rollout-1", 9)]


async def test_a_newer_version_replaces_one_that_waits_and_a_withdrawn_one_is_not_sent() -> None:
    found = await publish({0.0: 1, 0.5: 2, 1.0: 3, 8.0: 9}, engines=1)
    assert [version for _, version in found.announced] == [1, 3, 9]
    assert (await publish({10.0: -1, 15.0: 9})).announced == [(15.0, 9)]


# ---- reward workers --------------------------------------------------------------------------------------------------


async def test_reward_workers_take_the_samples_that_are_there() -> None:
    coordinator = FakeCoordinator()
    world = make_world(make_config(reward__batch=3), make_profile(score=(1.0, 0.5)), coordinator)
    working = asyncio.create_task(reward_worker("reward-0", world))
    jobs = [ScoreJob(f"g0.s{number}", "train", Prompt(0, ""), None) for number in range(6)]
    coordinator.offer(jobs[0])
    await asyncio.sleep(0.5)
    coordinator.offer(*jobs[1:])
    await asyncio.sleep(20)
    coordinator.end()
    await working
    assert [(time, len(ids)) for time, ids in coordinator.scored_at] == [(1.5, 1), (4.0, 3), (6.0, 2)]


# ---- shared devices --------------------------------------------------------------------------------------------------


async def test_shared_devices_serve_one_role_at_a_time_and_a_switch_takes_time() -> None:
    world = make_world(make_config(), make_profile(switch=3.0), FakeCoordinator())
    shared, log = SharedDevices(world.loop), []

    async def work(role: str, draws: Draws, seconds: float) -> None:
        await shared.take(role, draws)
        log.append((f"{draws.name} begins", world.loop.now))
        await asyncio.sleep(seconds)
        shared.leave()

    first, second = world.draws("rollout-0"), world.draws("rollout-1")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(work("rollout", first, 10))
        tasks.create_task(work("rollout", second, 12))
        tasks.create_task(work("trainer", world.draws("trainer"), 5))
    await work("rollout", first, 1)
    await work("rollout", first, 1)
    # The trainer has the devices to begin with, and waits for both engines; each hand-over takes 3 seconds.
    begins = [("rollout-0", 3), ("rollout-1", 3), ("trainer", 18), ("rollout-0", 26), ("rollout-0", 27)]
    assert log == [(f"{name} begins", time) for name, time in begins]


async def test_a_call_that_would_wait_is_refused_where_no_caller_can_wait() -> None:
    async def waits() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="waits"):
        at_once(waits())
