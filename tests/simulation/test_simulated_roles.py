"""Tests what an engine, a publisher and shared devices of the simulator do when a version comes, each alone, against
times worked out by hand. Everything else about them is held to the real roles in test_real_roles."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any, cast

import pytest
from omni_async_pipelines.qwen_image.sampling import QwenImageSampling

from omni_async.aio.waiting import Event
from omni_async.config import Config
from omni_async.control.coordinator import Coordinator
from omni_async.control.ledger import Ledger
from omni_async.control.versions import Versions
from omni_async.performance.emulation import Draws
from omni_async.performance.profile import Profile
from omni_async.simulation.simulate import _world
from omni_async.simulation.simulated_engine import Batch, SimulatedEngine
from omni_async.simulation.simulated_roles import SimulatedPublisher
from omni_async.simulation.world import SharedDevices, World, at_once
from omni_async.types import Prompt, SampleRequest, SampleResult, SdeWindow, WeightReport
from tests.simulation.simulation_world import make_config, make_profile

pytestmark = pytest.mark.virtual_time
WINDOW = SdeWindow(2, 4)
# A batch takes 10 seconds however large it is: a second for each denoising step.
PROFILE = make_profile(generate=10.0, swap=0.5, publish=2.0)


def request(sample: int) -> SampleRequest:
    spec = {"spec": QwenImageSampling(height=64, width=64), "num_inference_steps": 10, "noise_level": 0.7}
    number = {"sample_id": f"g0.s{sample}", "group": 0, "sample": sample, "seed": sample}
    return SampleRequest(kind="train", prompt=Prompt(0, "a prompt"), sde_kind="flow", window=WINDOW, **number, **spec)


class FakeCoordinator:
    """A coordinator that leases what a test offers until the `end`, and keeps what is reported, with its time."""

    def __init__(self) -> None:
        self._requests: list[SampleRequest] = []
        self._changed = Event()
        self._over = False
        self.done: list[tuple[float, SampleResult]] = []
        self.held: list[tuple[float, str, int]] = []
        self.announced: list[tuple[float, int]] = []
        self.ledger = Ledger(lambda entry: None)
        self.versions = Versions()

    def offer(self, count: int) -> None:
        self._requests += [request(sample) for sample in range(count)]
        self._changed.notify()

    def end(self) -> None:
        self._over = True
        self._changed.notify()

    async def next_samples(self, engine: str, free: int, capacity: int) -> list[SampleRequest]:
        while not self._requests and not self._over:
            await self._changed.wait()
        taken, self._requests = self._requests[:free], self._requests[free:]
        return taken

    async def samples_done(self, engine: str, results: list[SampleResult]) -> None:
        self.done += [(_now(), result) for result in results]

    async def announce(self, version: int, digest: str) -> None:
        self.announced.append((_now(), version))

    async def engine_holds(self, report: WeightReport) -> None:
        self.held.append((_now(), report.engine, report.version))


def _now() -> float:
    return round(asyncio.get_running_loop().time(), 6)


def make_world(config: Config, profile: Profile, coordinator: FakeCoordinator) -> World:
    """Builds the world of a simulation with another coordinator. To be called on the running loop of virtual time."""
    world = _world(config, profile, config.trainer.updates, seed=0, bundle=1)
    return replace(world, coordinator=cast(Coordinator, coordinator))


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


# ---- swaps -----------------------------------------------------------------------------------------------------------


async def test_swap_step_takes_effect_at_the_next_step_and_makes_the_batch_late_by_the_pause() -> None:
    alone = Alone()
    assert alone.stage(0) == 0.5
    alone.offer(2)
    await alone.at(4.0)  # the batch began at 0.5, after the pause
    assert alone.stage(1) == pytest.approx(5.0)  # step 4 begins at 4.5
    assert await alone.until(20) == {11.0: 2}
    assert [(r.version, tuple(r.step_versions)) for _, r in alone.coordinator.done] == [(0, (0, 0, 1, 1))] * 2


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
    alone.offer(offered)
    await alone.at(3.0)
    assert alone.stage(1) is None
    assert await alone.until(60) == done
    assert alone.coordinator.held == [(time, "rollout-0", version) for time, version in held]
    assert alone.versions() == [0] * old + [1] * (offered - old)


# ---- publisher -------------------------------------------------------------------------------------------------------


async def test_a_newer_version_replaces_one_that_waits_and_a_withdrawn_one_is_not_sent() -> None:
    coordinator = FakeCoordinator()
    world = make_world(make_config(trainer__updates=9), PROFILE, coordinator)
    publisher = SimulatedPublisher(world)
    delivering = asyncio.create_task(publisher.run([SimulatedEngine("rollout-0", world, publisher.swapped)]))
    for time, version in {0.0: 1, 0.5: 2, 1.0: 3, 8.0: -4, 15.0: 9}.items():  # negative ones are withdrawn
        await world.loop.sleep_until(time)
        publisher.publish(abs(version))
        if version < 0:
            publisher.withdraw()
    await delivering
    assert coordinator.announced == [(0.0, 1), (2.5, 3), (15.0, 9)]


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
