"""Tests engines, reward workers, publishers and shared devices of the simulator, each alone, against times worked
out by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from simulation_world import FakeCoordinator, make_config, make_profile, make_world, request

from omni_async.performance.emulation import Draws
from omni_async.simulation.simulated_roles import Batch, SimulatedEngine, SimulatedPublisher, reward_worker
from omni_async.simulation.virtual_time import run
from omni_async.simulation.world import SharedDevices, World, at_once
from omni_async.types import Prompt, ScoreJob, SdeWindow

WINDOW = SdeWindow(2, 4)
# A batch takes 10 seconds however large it is: a second for each denoising step.
PROFILE = make_profile(generate=10.0, swap=0.5, publish=2.0)


def engine_alone(
    script: Callable[[World, FakeCoordinator, SimulatedEngine], Awaitable[None]], profile: Any = PROFILE, **changes: Any
) -> FakeCoordinator:
    """Runs the engine `rollout-0`, leasing from the coordinator, while the script runs; then the run ends."""

    async def main() -> FakeCoordinator:
        coordinator = FakeCoordinator()
        world = make_world(
            make_config(**{"rollout__max_batch": 4, "rollout__max_inflight": 8, **changes}), profile, coordinator
        )
        engine = SimulatedEngine("rollout-0", world, lambda: None)
        leasing = asyncio.create_task(engine.lease())
        await script(world, coordinator, engine)
        coordinator.end()
        await leasing
        return coordinator

    return run(main())


def samples(count: int, first: int = 0) -> list[Any]:
    return [request(first + number, WINDOW) for number in range(count)]


def finished(coordinator: FakeCoordinator) -> dict[float, int]:
    """Counts samples by the time they were done."""
    times: dict[float, int] = {}
    for time, _ in coordinator.done:
        times[time] = times.get(time, 0) + 1
    return times


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_an_engine_makes_one_batch_after_the_other_and_all_samples_of_a_batch_at_once() -> None:
    async def script(world: World, coordinator: FakeCoordinator, engine: SimulatedEngine) -> None:
        coordinator.offer(*samples(10))
        await world.loop.sleep_until(35)

    assert finished(engine_alone(script)) == {10: 4, 20: 4, 30: 2}


def test_a_batch_takes_what_waits_and_its_time_depends_on_that() -> None:
    async def script(world: World, coordinator: FakeCoordinator, engine: SimulatedEngine) -> None:
        coordinator.offer(*samples(3))
        await world.loop.sleep_until(1)
        coordinator.offer(*samples(6, first=3))
        await world.loop.sleep_until(100)

    coordinator = engine_alone(script, make_profile(generate=(1.0, 2.0)))
    # 3 samples: 1 + 6 s; then 4 of those that came meanwhile, and the rest.
    assert finished(coordinator) == {7: 3, 16: 4, 21: 2}


def test_what_is_offered_in_one_instant_is_one_batch_in_whatever_pieces_it_comes() -> None:
    async def script(world: World, coordinator: FakeCoordinator, engine: SimulatedEngine) -> None:
        for number in range(4):
            coordinator.offer(*samples(1, first=number))
            await asyncio.sleep(0)
        await world.loop.sleep_until(15)

    assert finished(engine_alone(script)) == {10: 4}


def test_an_engine_never_holds_more_than_it_may() -> None:
    async def script(world: World, coordinator: FakeCoordinator, engine: SimulatedEngine) -> None:
        coordinator.offer(*samples(9))
        await world.loop.sleep_until(35)
        assert world.meters.reserved["trajectories"].largest == 9  # nothing is scored, so no slot is freed

    coordinator = engine_alone(script, rollout__max_inflight=3)
    assert finished(coordinator) == {10: 3, 20: 3, 30: 3}


# ---- swaps -----------------------------------------------------------------------------------------------------------


def test_swap_step_takes_effect_at_the_next_step_and_makes_the_batch_late_by_the_pause() -> None:
    async def script(world: World, coordinator: FakeCoordinator, engine: SimulatedEngine) -> None:
        assert engine.stage(0) == 0.5
        coordinator.offer(*samples(2))
        await world.loop.sleep_until(4.0)  # the batch began at 0.5, after the pause
        assert engine.stage(1) == pytest.approx(5.0)  # step 4 begins at 4.5
        await world.loop.sleep_until(20)

    coordinator = engine_alone(script)
    assert finished(coordinator) == {11.0: 2}
    assert [tuple(result.step_versions) for _, result in coordinator.done] == [(0, 0, 1, 1)] * 2
    assert [result.version for _, result in coordinator.done] == [0, 0]


def test_a_version_that_comes_before_the_first_step_makes_the_whole_sample() -> None:
    async def script(world: World, coordinator: FakeCoordinator, engine: SimulatedEngine) -> None:
        engine.stage(0)
        coordinator.offer(*samples(1))
        await world.loop.sleep_until(0.5)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert engine.stage(1) == 1.0
        await world.loop.sleep_until(20)

    coordinator = engine_alone(script)
    ((time, result),) = coordinator.done
    assert (time, result.version, tuple(result.step_versions)) == (11.0, 1, (1, 1, 1, 1))


def test_a_version_that_comes_during_the_last_step_waits_for_the_end_and_holds_up_the_next_batch() -> None:
    async def script(world: World, coordinator: FakeCoordinator, engine: SimulatedEngine) -> None:
        engine.stage(0)
        coordinator.offer(*samples(5))
        await world.loop.sleep_until(10.2)
        assert engine.stage(1) == pytest.approx(11.0)
        await world.loop.sleep_until(30)

    coordinator = engine_alone(script)
    assert finished(coordinator) == {10.5: 4, 21.0: 1}
    assert [result.step_versions.first for _, result in coordinator.done] == [0, 0, 0, 0, 1]


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


def test_swap_request_lets_the_engine_finish_what_it_has_and_nothing_more() -> None:
    async def script(world: World, coordinator: FakeCoordinator, engine: SimulatedEngine) -> None:
        assert engine.stage(0) == 0.5  # it holds nothing yet, so at once
        coordinator.offer(*samples(6))
        await world.loop.sleep_until(3.0)
        assert engine.stage(1) is None
        await world.loop.sleep_until(40)

    coordinator = engine_alone(script, weights__swap="request")
    assert finished(coordinator) == {10.5: 4, 21.0: 2}
    assert coordinator.held == [(11.0, "rollout-0", 1)]
    assert [result.step_versions.first for _, result in coordinator.done] == [0] * 4 + [1] * 2


def test_swap_drain_finishes_all_that_is_leased_and_leases_nothing_meanwhile() -> None:
    async def script(world: World, coordinator: FakeCoordinator, engine: SimulatedEngine) -> None:
        engine.stage(0)
        coordinator.offer(*samples(12))
        await world.loop.sleep_until(3.0)
        assert engine.stage(1) is None
        await world.loop.sleep_until(60)

    coordinator = engine_alone(script, weights__swap="drain")
    assert finished(coordinator) == {10.5: 4, 20.5: 4, 31.0: 4}
    assert coordinator.held == [(0.5, "rollout-0", 0), (21.0, "rollout-0", 1)]
    assert [result.step_versions.first for _, result in coordinator.done] == [0] * 8 + [1] * 4


@pytest.mark.parametrize("mode", ["step", "request", "drain"])
def test_an_idle_engine_swaps_at_once(mode: str) -> None:
    async def script(world: World, coordinator: FakeCoordinator, engine: SimulatedEngine) -> None:
        await world.loop.sleep_until(7)
        # One that drains leases nothing while it swaps, and reports by itself.
        assert engine.stage(4) == (None if mode == "drain" else 7.5)
        await world.loop.sleep_until(8)
        assert coordinator.held == ([(7.5, "rollout-0", 4)] if mode == "drain" else [])

    engine_alone(script, weights__swap=mode)


# ---- publisher -------------------------------------------------------------------------------------------------------


def publish(profile: Any, versions: dict[float, int], engines: int = 2, updates: int = 9) -> FakeCoordinator:
    """Runs idle engines, and versions that the trainer hands over at these times."""

    async def main() -> FakeCoordinator:
        coordinator = FakeCoordinator()
        world = make_world(make_config(rollout__workers=engines, trainer__updates=updates), profile, coordinator)
        publisher = SimulatedPublisher(world)
        receivers = [SimulatedEngine(f"rollout-{number}", world, publisher.swapped) for number in range(engines)]
        delivering = asyncio.create_task(publisher.run(receivers))
        for time, version in versions.items():
            await world.loop.sleep_until(time)
            publisher.publish(version)
        await delivering
        return coordinator

    return run(main())


def test_a_version_reaches_every_engine_after_the_publish_and_the_pause() -> None:
    coordinator = publish(PROFILE, {1.0: 9})
    assert coordinator.announced == [(1.0, 9)]
    assert coordinator.held == [(3.5, "rollout-0", 9), (3.5, "rollout-1", 9)]


def test_a_newer_version_replaces_one_that_waits() -> None:
    coordinator = publish(PROFILE, {0.0: 1, 0.5: 2, 1.0: 3, 8.0: 9}, engines=1)
    assert [version for _, version in coordinator.announced] == [1, 3, 9]


def test_a_withdrawn_version_is_not_sent() -> None:
    async def main() -> list[tuple[float, int]]:
        coordinator = FakeCoordinator()
        publisher = SimulatedPublisher(make_world(make_config(trainer__updates=2), PROFILE, coordinator))
        delivering = asyncio.create_task(publisher.run([]))
        publisher.publish(1)
        publisher.withdraw()
        await asyncio.sleep(5)
        publisher.publish(2)
        await delivering
        return coordinator.announced

    assert run(main()) == [(5, 2)]


# ---- reward workers --------------------------------------------------------------------------------------------------


def test_reward_workers_take_the_samples_that_are_there() -> None:
    async def main() -> FakeCoordinator:
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
        return coordinator

    assert [(time, len(ids)) for time, ids in run(main()).scored_at] == [(1.5, 1), (4.0, 3), (6.0, 2)]


# ---- shared devices --------------------------------------------------------------------------------------------------


def test_shared_devices_serve_one_role_at_a_time_and_a_switch_takes_time() -> None:
    async def main() -> list[tuple[str, float]]:
        world = make_world(make_config(), make_profile(switch=3.0), FakeCoordinator())
        shared, log = SharedDevices(world.loop), []

        async def work(role: str, draws: Draws, seconds: float) -> None:
            await shared.take(role, draws)
            log.append((f"{draws.name} begins", world.loop.now))
            await asyncio.sleep(seconds)
            shared.leave()

        engines = [world.draws("rollout-0"), world.draws("rollout-1")]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(work("rollout", engines[0], 10))
            tasks.create_task(work("rollout", engines[1], 12))
            tasks.create_task(work("trainer", world.draws("trainer"), 5))
        await work("rollout", engines[0], 1)
        await work("rollout", engines[0], 1)
        return log

    # The trainer has the devices to begin with, and waits for both engines; each hand-over takes 3 seconds.
    assert run(main()) == [
        ("rollout-0 begins", 3),
        ("rollout-1 begins", 3),
        ("trainer begins", 18),
        ("rollout-0 begins", 26),
        ("rollout-0 begins", 27),
    ]


# ---- small things ----------------------------------------------------------------------------------------------------


def test_a_call_that_would_wait_is_refused_where_no_caller_can_wait() -> None:
    async def waits() -> None:
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        with pytest.raises(RuntimeError, match="waits"):
            at_once(waits())

    run(main())
