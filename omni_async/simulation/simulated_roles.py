"""Simulates the roles on the fast path of virtual time: light coroutines that take a profile's time and make nothing.

The real roles run in virtual time too, with emulated devices, but a job then costs 24 times the CPU time (100 engines
and 100 updates, 40,000 samples: 22.7 s for 0.94 s), for the tasks and timers of every sample and the periodic flushes
of every role. A sweep or a search makes dozens of such jobs. So this module describes the roles once more, and nothing
else does: coordinator, profile and draws (`omni_async.performance.emulation`) are the real roles' own, and
`tests/simulation/test_real_roles.py` holds times and staleness to theirs.

| role      | waits for                                   | unblocked by                               |
|-----------|---------------------------------------------|--------------------------------------------|
| engine    | a lease                                     | admission, free trajectory slots           |
|           | a free slot                                 | a batch's end                              |
|           | before a batch: the end of a pause          | time                                       |
| reward    | generated samples (starved)                 | `samples_done` of an engine                |
| trainer   | the next group (starved)                    | the group's last score                     |
| publisher | a version; then until every engine holds it | the trainer's export; swaps of the engines |
| watcher   | the run's end                               | the coordinator                            |

An engine (a producer and an emulated engine in one) leases samples whenever it has a free slot, and generates them
batch after batch; a batch is formed when everything else of that instant has happened. A staged version takes effect

  step     at the next boundary between two denoising steps, which lie evenly in a batch's time; the batch ends a pause
           later
  request  when all samples in the engine, running or queued for its next batch, are done
  drain    when all leased samples are done; nothing is leased until the pause is over

There are many engines and they do most of what happens, so only leasing is a coroutine; the loop calls the rest.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence

from omni_async.aio.batches import Load, room_of
from omni_async.aio.waiting import Event
from omni_async.algorithms.kinds import samples_per_rank
from omni_async.performance.emulation import Draws
from omni_async.performance.scorer_lanes import ScorerLanes, scorer_lanes
from omni_async.simulation.world import SharedDevices, World, at_once, digest_of
from omni_async.types import (
    ReadyGroup,
    SampleRequest,
    SampleResult,
    Score,
    ScoreJob,
    ScoreResult,
    SdeWindow,
    UpdateReport,
    WeightReport,
)
from omni_async.version_spans import VersionSpans

# What samples earn has no influence on how long anything takes; groups without variance are not rejected here.
_SCORE = Score(0.0)


async def reward_worker(name: str, world: World) -> None:
    """Score samples until the run is over."""
    scorers = scorer_lanes(world.config, world.profile)
    if len(scorers) > 1 or scorers[0].concurrency != 1:
        await SimulatedPanel(name, world, scorers).run()
    else:
        await _score_in_turn(name, world)


async def _score_in_turn(name: str, world: World) -> None:
    """Score one batch at a time, of the samples that are there: the only scorer takes one call at a time."""
    coordinator, loop, draws = world.coordinator, world.loop, world.draws(name)
    shared = world.shared if world.config.placement.reward_in_turn else None
    meters = world.meters
    busy, starved, reserved = meters.busy["reward"], meters.waiting["reward"], meters.reserved["trajectories"]
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
        await coordinator.scored(name, [ScoreResult(job.sample_id, job.attempt, _SCORE) for job in jobs])


Scored = Callable[[list[ScoreJob]], None]


class SimulatedScorer:
    """One of several scorers of a reward worker: it forms batches as real ones do. Calls `scored` with each."""

    def __init__(
        self, world: World, draws: Draws, lanes: ScorerLanes, scored: Callable[[list[ScoreJob]], None]
    ) -> None:
        self.load = Load(lanes.batch, lanes.concurrency)
        self._world, self._draws, self._stage = world, draws, f"score/{lanes.label}"
        self._scored = scored
        self._waiting: deque[ScoreJob] = deque()

    def take(self, jobs: Sequence[ScoreJob]) -> None:
        """Queue samples, and begin what can be begun."""
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
    """A reward worker with several scorers side by side, or with one that takes several calls at once."""

    def __init__(self, name: str, world: World, scorers: Sequence[ScorerLanes]) -> None:
        self._name, self._world = name, world
        each = [(lanes, world.draws(name if lanes.alone else f"{name}/{lanes.label}")) for lanes in scorers]
        self._scorers = [SimulatedScorer(world, draws, lanes, self._one_scored) for lanes, draws in each]
        self._missing: dict[str, int] = {}  # scorers that have not answered, by sample
        self._busy_since = 0.0
        self._changed = Event()

    async def run(self) -> None:
        """Take samples until the run is over."""
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
        """Hand in the samples that this was the last missing answer for."""
        world, done = self._world, []
        for job in jobs:
            self._missing[job.sample_id] -= 1
            if not self._missing[job.sample_id]:
                del self._missing[job.sample_id]
                done.append(ScoreResult(job.sample_id, job.attempt, _SCORE))
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
        """Draw the seconds of all passes and steps, in the order in which an emulated trainer draws them."""
        trainer = self._world.config.trainer
        seconds = sum(self._recompute_proximal() for _ in range(trainer.groups_per_update))
        for number in range(1, trainer.groups_per_update + 1):
            seconds += self._draws.seconds("train", self._units)
            if number % (trainer.groups_per_update // trainer.steps_per_update) == 0:
                seconds += self._draws.seconds("step")
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
        started = self._world.loop.now
        await self._world.loop.sleep_until(started + seconds)
        self._world.meters.busy["trainer"].add(started, self._world.loop.now)

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


# Two instants closer than this are one.
_INSTANT_S = 1e-9


class Batch:
    """Samples that are generated together.

    `swaps`: (first denoising step, version that computes from that step on), oldest first."""

    def __init__(self, requests: list[SampleRequest], start: float, seconds: float, steps: int, version: int) -> None:
        self.requests, self.steps = requests, steps
        self.start, self.end, self.step_s = start, start + seconds, seconds / steps
        self.paused = 0.0
        self.swaps = [(0, version)]

    def next_boundary(self, now: float) -> int:
        """Return the first denoising step that has not begun; `steps` if none is left."""
        if self.step_s <= 0:
            return self.steps
        return min(self.steps, math.ceil((now - self.start - self.paused - _INSTANT_S) / self.step_s))

    def swap(self, step: int, version: int, pause: float) -> None:
        """Let another version compute from a step on, after a pause that makes the batch longer.

        Args:
            step: the first denoising step that has not begun.
            version: that of the new weights.
            pause: seconds."""
        self.swaps.append((step, version))
        self.paused += pause
        self.end += pause

    def version_at(self, step: int) -> int:
        return next(version for first, version in reversed(self.swaps) if step >= first)

    def versions(self, window: SdeWindow | None) -> VersionSpans:
        """Return the versions of the trained steps: the window's steps, or all."""
        if len(self.swaps) == 1:
            return VersionSpans.same(self.swaps[0][1], window.size if window else self.steps)
        return VersionSpans.of(self.version_at(step) for step in (window.steps if window else range(self.steps)))


class SimulatedEngine:
    """A rollout engine whose batches only take time.

    Calls `swapped` when it holds a version whose time `stage` could not predict."""

    def __init__(self, name: str, world: World, swapped: Callable[[], None]) -> None:
        self.name = name
        self._world = world
        self._loop = world.loop
        self._draws = world.draws(name)
        self._swapped = swapped
        self._rollout = world.config.rollout
        self._nbytes = world.bundle * (world.profile.payload.trajectory + world.profile.payload.media)
        self._drains = world.config.weights.swap == "drain"
        self._leased: deque[SampleRequest] = deque()
        self._held = 0  # leased, running ones included
        self._version = -1
        self._batch: Batch | None = None
        self._working = False  # on a batch or a swap
        self._woken = False
        self._paused_until = 0.0
        self._pending: int | None = None  # a version that waits for `_owed` more samples
        self._owed = 0
        self._slot_free = Event()
        self._turn: asyncio.Task[None] | None = None
        self._idle_since = self._loop.now
        self._waiting, self._busy = world.meters.waiting["rollout"], world.meters.busy["rollout"]
        self._reserved = world.meters.reserved["trajectories"]

    async def lease(self) -> None:
        """Lease samples until the run is over."""
        coordinator, capacity = self._world.coordinator, self._rollout.max_inflight
        while True:
            while self._held >= capacity or (self._drains and self._pending is not None):
                await self._slot_free.wait()
            requests = await coordinator.next_samples(self.name, capacity - self._held, capacity)
            if not requests:
                break
            self._reserved.add(len(requests))
            if not self._held:
                self._waiting.add(self._idle_since, self._loop.now)
            self._held += len(requests)
            self._leased.extend(requests)
            self._wake()
        if not self._held:
            self._waiting.add(self._idle_since, self._loop.now)

    def _wake(self) -> None:
        """Schedule `_act`, once everything else of this instant has happened."""
        if not self._woken:
            self._woken = True
            self._loop.when_settled(self._act)

    def _act(self) -> None:
        self._woken = False
        if self._working:
            return
        if self._pending is not None and not self._owed:
            self._working = True
            self._loop.call_when(self._loop.now + self._draws.seconds("swap"), self._swap)
        elif self._leased and self._loop.now < self._paused_until - _INSTANT_S:
            self._loop.call_when(self._paused_until, self._wake)
        elif self._leased:
            self._working = True
            if self._world.shared is None:
                self._begin()
            else:
                self._turn = asyncio.create_task(self._begin_in_turn(self._world.shared))

    async def _begin_in_turn(self, shared: SharedDevices) -> None:
        await shared.take("rollout", self._draws)
        self._begin()

    def _begin(self) -> None:
        world, leased = self._world, self._leased
        most = self._rollout.max_batch if self._pending is None else min(self._rollout.max_batch, self._owed)
        requests = [leased.popleft() for _ in range(min(most, len(leased)))]
        seconds = self._draws.seconds("generate", len(requests) * world.bundle)
        self._batch = Batch(requests, self._loop.now, seconds, self._rollout.num_inference_steps, self._version)
        self._loop.call_when(self._batch.end, self._finish, self._batch)

    def _finish(self, batch: Batch) -> None:
        now, requests = self._loop.now, batch.requests
        if batch.end > now + _INSTANT_S:
            self._loop.call_when(batch.end, self._finish, batch)  # a swap came in between
            return
        self._batch, self._working = None, False
        self._busy.add(batch.start, now)
        if self._world.shared is not None:
            self._world.shared.leave()
        if self._pending is not None:
            self._owed -= len(requests)
        self._held -= len(requests)
        if not self._held:
            self._idle_since = now
        first = batch.version_at(0)
        span = (batch.start, now, self._nbytes)
        results = [
            SampleResult(r.sample_id, self.name, None, None, first, batch.versions(r.window), *span) for r in requests
        ]
        at_once(self._world.coordinator.samples_done(self.name, results))
        self._slot_free.notify()
        self._wake()

    # ---- weights -----------------------------------------------------------------------------------------------------

    def stage(self, version: int) -> float | None:
        """Take a version that has arrived.

        Returns when the engine will hold it, or None if that depends on samples it must finish first; it then calls
        `swapped`."""
        now, batch = self._loop.now, self._batch
        in_engine = self._held if self._drains else min(self._held, self._rollout.max_batch)
        if self._drains or (in_engine and self._world.config.weights.swap == "request"):
            self._pending, self._owed = version, in_engine
            self._wake()
            return None
        pause = self._draws.seconds("swap")
        self._version = version
        if batch is None:
            self._paused_until = now + pause
            return self._paused_until
        step = batch.next_boundary(now)
        if step == batch.steps:
            self._paused_until = batch.end + pause
            return self._paused_until
        begins = max(now, batch.start + batch.paused + step * batch.step_s)
        batch.swap(step, version, pause)
        return begins + pause

    def _swap(self) -> None:
        """End the pause at the boundary that `request` and `drain` waited for."""
        if self._pending is None:
            raise ValueError(f"{self.name} has nothing to swap to")
        self._version, self._pending, self._working = self._pending, None, False
        at_once(self._world.coordinator.engine_holds(WeightReport(self.name, self._version, digest_of(self._version))))
        self._world.count_groups()
        self._slot_free.notify()
        self._swapped()
        self._wake()
