"""Simulates an engine on the fast path of virtual time: a producer and an emulated engine in one.

It leases samples whenever it has a free slot, and generates them batch after batch. It forms a batch after all other
events of that instant. A staged version takes effect:

step     at the next boundary between two denoising steps, which are evenly spaced in a batch's time; the batch ends
         a pause later
request  when all samples in the engine, running or queued for its next batch, are done
drain    when all leased samples are done; nothing is leased until the pause is over

The many engines cause most events, so only leasing is a coroutine; the loop calls the rest.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable

from omni_async.aio.waiting import Event
from omni_async.simulation.world import SharedDevices, World, at_once, digest_of
from omni_async.types import SampleRequest, SampleResult, VersionSpans, WeightReport

# Two instants closer than this are one.
INSTANT_S = 1e-9


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
        return min(self.steps, math.ceil((now - self.start - self.paused - INSTANT_S) / self.step_s))

    def swap(self, step: int, version: int, pause: float) -> None:
        """Switch to another version from a step on, after a pause that makes the batch longer.

        Args:
            step: the first denoising step that has not begun.
            version: the version of the new weights.
            pause: seconds."""
        self.swaps.append((step, version))
        self.paused += pause
        self.end += pause

    def version_at(self, step: int) -> int:
        return next(version for first, version in reversed(self.swaps) if step >= first)

    def versions(self, request: SampleRequest) -> VersionSpans:
        """Return the versions of a sample's trained steps: its window's, or all; none of a validation sample."""
        every_step = range(self.steps if request.kind == "train" else 0)
        steps = request.window.steps if request.window else every_step
        if len(self.swaps) == 1:
            return VersionSpans.same(self.swaps[0][1], len(steps))
        return VersionSpans.of(self.version_at(step) for step in steps)


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
        self._nbytes = world.bundle * world.profile.payload.trajectory
        self._media_bytes = world.bundle * world.profile.payload.media
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
            self._world.count_groups()  # a timer may have admitted them
            if not self._held:
                self._waiting.add(self._idle_since, self._loop.now)
            self._held += len(requests)
            self._leased.extend(requests)
            self._wake()
        if not self._held:
            self._waiting.add(self._idle_since, self._loop.now)

    def _wake(self) -> None:
        """Schedule `_act`, after all other events of this instant."""
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
        elif self._leased and self._loop.now < self._paused_until - INSTANT_S:
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
        steps = self._rollout.num_inference_steps
        if world.config.emulation is None:  # validation samples may have more steps; emulated devices ignore that
            seconds *= sum(request.num_inference_steps for request in requests) / (steps * len(requests))
        self._batch = Batch(requests, self._loop.now, seconds, steps, self._version)
        self._loop.call_when(self._batch.end, self._finish, self._batch)

    def _finish(self, batch: Batch) -> None:
        now, requests = self._loop.now, batch.requests
        if batch.end > now + INSTANT_S:
            self._loop.call_when(batch.end, self._finish, batch)  # a swap came in between
            return
        self._batch, self._working = None, False
        self._busy.add(batch.start, now)
        if self._world.shared is not None:
            self._world.shared.leave()
        span = (batch.start, now, self._nbytes, 0, 0, self._media_bytes)
        first = batch.version_at(0)
        self._report(
            [SampleResult(r.sample_id, self.name, None, None, first, batch.versions(r), *span) for r in requests]
        )

    def _report(self, results: list[SampleResult]) -> None:
        """Report samples that are done, which frees their slots."""
        if self._pending is not None:
            self._owed -= len(results)
        self._held -= len(results)
        if not self._held:
            self._idle_since = self._loop.now
        at_once(self._world.coordinator.samples_done(self.name, results))
        self._slot_free.notify()
        self._wake()

    # ---- weights -----------------------------------------------------------------------------------------------------

    def stage(self, version: int) -> float | None:
        """Accept a version that has arrived.

        Returns the time when the engine will hold it, or None if that depends on samples to be finished first; it then
        calls `swapped`."""
        in_engine = self._held if self._drains else min(self._held, self._rollout.max_batch)
        if self._drains or (in_engine and self._world.config.weights.swap == "request"):
            self._pending, self._owed = version, in_engine
            self._wake()
            return None
        self._version = version
        return self._swap_between(self._draws.seconds("swap"))

    def _swap_between(self, pause: float) -> float:
        """Switch to `_version` at the next boundary between two steps; returns when the pause is over."""
        now, batch = self._loop.now, self._batch
        if batch is None:
            self._paused_until = now + pause
            return self._paused_until
        step = batch.next_boundary(now)
        if step == batch.steps:
            self._paused_until = batch.end + pause
            return self._paused_until
        begins = max(now, batch.start + batch.paused + step * batch.step_s)
        batch.swap(step, self._version, pause)
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
