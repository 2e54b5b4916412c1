"""Simulates the roles on the fast path of virtual time: light coroutines that only take a profile's time.

The real roles run in virtual time too, with emulated devices, but a job then costs 24 times the CPU time (100 engines
and 100 updates, 40,000 samples: 22.7 s instead of 0.94 s), for the tasks and timers of every sample and the periodic
flushes of every role. A sweep or a search runs dozens of such jobs.

So this module describes the roles a second time. Everything else is shared with the real roles: coordinator, profile
and draws (`omni_async.performance.emulation`). `tests/simulation/test_real_roles.py` checks times and staleness against
the real roles.

| role      | waits for                                   | unblocked by                               |
|-----------|---------------------------------------------|--------------------------------------------|
| engine    | a lease                                     | admission, free trajectory slots           |
|           | a free slot                                 | a batch's end                              |
|           | before a batch: the end of a pause          | time                                       |
| reward    | generated samples (starved)                 | `samples_done` of an engine                |
| trainer   | the next group (starved)                    | the group's last score                     |
| publisher | a version; then until every engine holds it | the trainer's export; swaps of the engines |
| watcher   | the run's end                               | the coordinator                            |

The engine is in `simulated_engine`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from omni_async.aio.batches import Load, room_of
from omni_async.aio.waiting import Event
from omni_async.algorithms.kinds import samples_per_rank
from omni_async.performance.emulation import Draws
from omni_async.performance.scorer_lanes import ScorerLanes, scorer_lanes
from omni_async.simulation.simulated_engine import SimulatedEngine
from omni_async.simulation.world import World, at_once, digest_of
from omni_async.types import ReadyGroup, ScoreJob, ScoreResult, UpdateReport, WeightReport


async def reward_worker(name: str, world: World) -> None:
    """Score samples until the run is over."""
    scorers = scorer_lanes(world.config, world.profile)
    if len(scorers) > 1 or scorers[0].concurrency != 1:
        await SimulatedPanel(name, world, scorers).run()
    else:
        await _score_in_turn(name, world)


async def _score_in_turn(name: str, world: World) -> None:
    """Score the available samples, one batch at a time: the only scorer takes one call at a time."""
    coordinator, loop, draws = world.coordinator, world.loop, world.draws(name)
    shared = world.shared if world.config.placement.reward_in_turn else None
    meters = world.meters
    busy, starved, reserved = meters.busy["reward"], meters.waiting["reward"], meters.reserved["trajectories"]
    results: list[ScoreResult] = []
    while True:
        asked = loop.now
        jobs = await coordinator.next_to_score(name, world.config.reward.batch, results)
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
        results = [ScoreResult(job.sample_id, job.attempt, score=world.score(job)) for job in jobs]


Scored = Callable[[list[ScoreJob]], None]


class SimulatedScorer:
    """One of several scorers of a reward worker, with the batching of real scorers. Calls `scored` with each batch."""

    def __init__(
        self, world: World, draws: Draws, lanes: ScorerLanes, scored: Callable[[list[ScoreJob]], None]
    ) -> None:
        self.load = Load(lanes.batch, lanes.concurrency)
        self._world, self._draws, self._stage = world, draws, f"score/{lanes.label}"
        self._scored = scored
        self._waiting: deque[ScoreJob] = deque()

    def take(self, jobs: Sequence[ScoreJob]) -> None:
        """Queue samples, and begin as many batches as possible."""
        self._waiting += jobs
        self.load.waiting += len(jobs)
        self._begin()

    def _begin(self) -> None:
        loop = self._world.loop
        while size := self.load.next_size(self.load.batch):
            batch = [self._waiting.popleft() for _ in range(size)]
            self.load.waiting -= size
            self.load.running += 1
            self.load.items_running += size
            loop.call_when(loop.now + self._draws.seconds(self._stage, size * self._world.bundle), self._end, batch)

    def _end(self, batch: list[ScoreJob]) -> None:
        self.load.running -= 1
        self.load.items_running -= len(batch)
        self._begin()
        self._scored(batch)


class SimulatedPanel:
    """A reward worker with several concurrent scorers, or with a scorer that takes several calls at once."""

    def __init__(self, name: str, world: World, scorers: Sequence[ScorerLanes]) -> None:
        self._name, self._world = name, world
        each = [(lanes, world.draws(name if lanes.alone else f"{name}/{lanes.label}")) for lanes in scorers]
        self._scorers = [SimulatedScorer(world, draws, lanes, self._one_scored) for lanes, draws in each]
        self._missing: dict[str, int] = {}  # scorers that have not answered, by sample
        self._busy_since = 0.0
        self._changed = Event()

    async def run(self) -> None:
        """Request samples until the run is over."""
        world = self._world
        while True:
            room = room_of([scorer.load for scorer in self._scorers])
            if not room:
                await self._changed.wait()
                continue
            asked = world.loop.now
            jobs = await world.coordinator.next_to_score(self._name, room)
            if not self._missing:
                world.meters.waiting["reward"].add(asked, world.loop.now)
                self._busy_since = world.loop.now
            if not jobs:
                return
            for job in jobs:
                self._missing[job.sample_id] = len(self._scorers)
            for scorer in self._scorers:
                scorer.take(jobs)

    def _one_scored(self, jobs: list[ScoreJob]) -> None:
        """Report the samples whose last missing answer arrived."""
        world, done = self._world, []
        for job in jobs:
            self._missing[job.sample_id] -= 1
            if not self._missing[job.sample_id]:
                del self._missing[job.sample_id]
                done.append(ScoreResult(job.sample_id, job.attempt, score=world.score(job)))
        if done:
            if not self._missing:
                world.meters.busy["reward"].add(self._busy_since, world.loop.now)
            world.meters.reserved["trajectories"].add(-len(done))
            at_once(world.coordinator.scored(self._name, done))
        self._changed.notify()


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
                    await self._work(lambda: self._recompute_proximal() + self._draws.seconds("train", self._units))
        await self._work((lambda: self._draws.seconds("step")) if streams else self._train_collected)
        finished = UpdateReport(version, tuple(group.group for group in groups), {}, started, world.loop.now)
        await world.coordinator.update_done(finished)
        return True

    def _recompute_proximal(self) -> float:
        return self._draws.seconds("proximal", self._units) if self._world.plan.proximal else 0.0

    def _train_collected(self) -> float:
        """Draw the seconds of all passes and steps, in an emulated trainer's order of draws."""
        trainer = self._world.config.trainer
        seconds = sum(self._recompute_proximal() for _ in range(trainer.groups_per_update))
        for number in range(1, trainer.groups_per_update + 1):
            seconds += self._draws.seconds("train", self._units)
            if number % (trainer.groups_per_update // trainer.steps_per_update) == 0:
                seconds += self._draws.seconds("step")
        return seconds

    async def _work(self, draw: Callable[[], float]) -> None:
        """Work for the seconds that `draw` returns, after the trainer got its devices."""
        shared = self._world.shared
        if shared is not None:
            await shared.take("trainer", self._draws)
        await self._busy(draw())
        if shared is not None:
            shared.leave()

    async def _busy(self, seconds: float) -> None:
        started = self._world.loop.now
        await self._world.loop.sleep_until(started + seconds)
        self._world.meters.busy["trainer"].add(started, self._world.loop.now)

    async def _publish(self, version: int) -> None:
        self._publisher.withdraw()
        await self._busy(self._draws.seconds("export"))
        self._publisher.publish(version)


class SimulatedPublisher:
    """The publisher. It delivers one version at a time, next the newest of those exported meanwhile."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._next: int | None = None
        self._missing = 0
        self._changed = Event()

    def withdraw(self) -> None:
        """Discard a version that has not left, because a newer one is about to be exported."""
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
    """Wait until the run is over. Raises RuntimeError unless its status is done."""
    while True:
        for event in await world.coordinator.events():
            if event.kind == "ended":
                if event.data["status"] != "done":
                    raise RuntimeError(f"the simulated run {event.data['status']}: {event.data['reason']}")
                return
