"""Simulates the roles on the fast path of virtual time: light coroutines that take a profile's time and make nothing.

The real roles run in virtual time too, with emulated devices, but a job then costs 24 times the CPU time (100 engines
and 100 updates, 40,000 samples: 22.7 s for 0.94 s), for the tasks and timers of every sample and the periodic flushes
of every role. A sweep or a search makes dozens of such jobs. So this module and `engine` describe the roles once more,
and nothing else does: coordinator, profile and draws (`omni_async.performance.emulation`) are the real roles' own, and
`tests/simulation/test_real_roles.py` holds times and staleness to theirs.

| role      | waits for                                   | unblocked by                               |
|-----------|---------------------------------------------|--------------------------------------------|
| reward    | generated samples (starved)                 | `samples_done` of an engine                |
| trainer   | the next group (starved)                    | the group's last score                     |
| publisher | a version; then until every engine holds it | the trainer's export; swaps of the engines |
| watcher   | the run's end                               | the coordinator                            |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from omni_async.aio.waiting import Event
from omni_async.algorithms.dealing import samples_per_rank
from omni_async.simulation.engine import SimulatedEngine
from omni_async.simulation.world import World, at_once, digest_of
from omni_async.types import ReadyGroup, Score, ScoreResult, UpdateReport, WeightReport

# What samples earn has no influence on how long anything takes; groups without variance are not rejected here.
_SCORE = Score(0.0)


async def reward_worker(name: str, world: World) -> None:
    """Score one batch at a time, of the samples that are there, until the run is over."""
    coordinator, loop, draws = world.coordinator, world.loop, world.draws(name)
    shared = world.shared if world.config.placement.reward_in_turn else None
    busy, starved, reserved = (
        world.meters.busy["reward"],
        world.meters.waiting["reward"],
        world.meters.reserved["trajectories"],
    )
    while True:
        asked = loop.now
        jobs = await coordinator.next_to_score(name, world.config.reward.batch)
        starved.add(asked, loop.now)
        if not jobs:
            return
        if shared is not None:
            await shared.take("reward", draws)
        started = loop.now
        await loop.sleep_until(started + draws.seconds("score", len(jobs) * world.bundle))
        busy.add(started, loop.now)
        if shared is not None:
            shared.leave()
        reserved.add(-len(jobs))
        await coordinator.scored(
            name,
            [ScoreResult(job.sample_id, job.attempt, _SCORE) for job in jobs],
        )


class SimulatedTrainer:
    """The trainer. Calls `updated` after every update with its number, before the version is exported."""

    def __init__(self, world: World, publisher: SimulatedPublisher, updated: Callable[[int], None]) -> None:
        self._world = world
        self._publisher = publisher
        self._updated = updated
        self._draws = world.draws("trainer")
        config = world.config
        self._units = samples_per_rank(config, config.rollout.group_size * world.bundle)

    async def run(self) -> None:
        """Train until all updates are made, or the run is over."""
        config = self._world.config
        every, last = config.weights.publish_every, config.trainer.updates
        await self._publish(0)
        for version in range(1, last + 1):
            if not await self._update(version):
                return
            self._updated(version)
            if version % every == 0 or version == last:
                await self._publish(version)

    async def _update(self, version: int) -> bool:
        world, wanted = self._world, self._world.config.trainer.groups_per_update
        streams, started = world.plan.mode != "collect", world.loop.now
        groups: list[ReadyGroup] = []
        while len(groups) < wanted:
            asked = world.loop.now
            taken = await world.coordinator.next_groups(version - 1, wanted - len(groups))
            world.meters.waiting["trainer"].add(asked, world.loop.now)
            if not taken:
                return False
            world.count_groups(taken=len(taken))
            groups += taken
            if streams:
                for _ in taken:
                    await self._work(self._pass_group)
        await self._work(self._step if streams else self._train_collected)
        finished = UpdateReport(version, tuple(group.group for group in groups), {}, started, world.loop.now)
        await world.coordinator.update_done(finished)
        return True

    def _recompute_proximal(self) -> float:
        return self._draws.seconds("proximal", self._units) if self._world.plan.proximal else 0.0

    def _pass_group(self) -> float:
        return self._recompute_proximal() + self._draws.seconds("train", self._units)

    def _step(self) -> float:
        return self._draws.seconds("step")

    def _train_collected(self) -> float:
        """Draw the seconds of all passes and steps, in the order in which an emulated trainer draws them."""
        trainer, seconds = self._world.config.trainer, 0.0
        for _ in range(trainer.groups_per_update):
            seconds += self._recompute_proximal()
        for number in range(1, trainer.groups_per_update + 1):
            seconds += self._draws.seconds("train", self._units)
            if number % (trainer.groups_per_update // trainer.steps_per_update) == 0:
                seconds += self._step()
        return seconds

    async def _work(self, draw: Callable[[], float]) -> None:
        """Work for the seconds that are drawn once the trainer has its devices."""
        shared = self._world.shared
        if shared is not None:
            await shared.take("trainer", self._draws)
        await self._busy(draw())
        if shared is not None:
            shared.leave()

    async def _busy(self, seconds: float) -> None:
        loop = self._world.loop
        started = loop.now
        await loop.sleep_until(started + seconds)
        self._world.meters.busy["trainer"].add(started, loop.now)

    async def _publish(self, version: int) -> None:
        self._publisher.withdraw()
        await self._busy(self._draws.seconds("export"))
        self._publisher.publish(version)


class SimulatedPublisher:
    """The publisher. One version is on its way at a time; the newest of those that come meanwhile is next."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._next: int | None = None
        self._missing = 0
        self._changed = Event()

    def withdraw(self) -> None:
        """Drop a version that has not left, because a newer one is about to be copied out."""
        self._next = None

    def publish(self, version: int) -> None:
        self._next = version
        self._changed.notify()

    def swapped(self) -> None:
        """Count one more engine that holds the version."""
        self._missing -= 1
        if not self._missing:
            self._world.count_groups()
            self._changed.notify()

    async def run(self, engines: Sequence[SimulatedEngine]) -> None:
        """Deliver versions until every engine holds the last one."""
        world, version = self._world, 0
        while version < world.config.trainer.updates:
            while self._next is None:
                await self._changed.wait()
            version, self._next = self._next, None
            await world.coordinator.announce(version, digest_of(version))
            await world.loop.sleep_until(world.loop.now + world.draws(f"publish/{version}").seconds("publish"))
            await self._deliver(version, engines)

    async def _deliver(self, version: int, engines: Sequence[SimulatedEngine]) -> None:
        loop, digest = self._world.loop, digest_of(version)
        self._missing = len(engines)
        for engine in engines:
            when = engine.stage(version)
            if when is not None:
                loop.call_when(when, self._holds, engine.name, version, digest)
        while self._missing:
            await self._changed.wait()

    def _holds(self, engine: str, version: int, digest: str) -> None:
        at_once(self._world.coordinator.engine_holds(WeightReport(engine, version, digest)))
        self.swapped()


async def watch(world: World) -> None:
    """Wait until the run is over. Raises RuntimeError if it did not end as it should."""
    while True:
        for event in await world.coordinator.events():
            if event.kind == "ended":
                if event.data["status"] != "done":
                    raise RuntimeError(f"the simulated run {event.data['status']}: {event.data['reason']}")
                return
