"""Holds the shared state of one simulation: the job, the service times, the coordinator, the clock, the meters.

Meters measure roles and buffers in the steady part of the run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from omni_async.aio.waiting import Event
from omni_async.config import Config
from omni_async.control.coordinator import Coordinator
from omni_async.performance.emulation import Draws
from omni_async.performance.profile import Profile
from omni_async.roles.plan import Plan
from omni_async.simulation.result import Occupancy
from omni_async.simulation.virtual_time import VirtualTimeLoop
from omni_async.types import Score, ScoreJob

T = TypeVar("T")
_SCORE = Score(0.0)


def digest_of(version: int) -> str:
    """Return the digest of a version, which has no weights here."""
    return f"version {version}"


def at_once(call: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coordinator call that does not wait, for callers that are no coroutines.

    Raises RuntimeError if it would wait."""
    try:
        call.send(None)
    except StopIteration as finished:
        return finished.value
    call.close()
    raise RuntimeError(f"{call} waits")


class SharedDevices:
    """Devices that the roles use in turns.

    A role holds them while any of its workers works; then the role that requested them first gets them. Every worker
    takes the profile's `switch` time when it first works after its role got the devices back.

    `take` waits for the other roles' work to end; unblocked by `leave`."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._loop = loop
        self._holder = "trainer"  # it trained the version that the engines wait for
        self._working = 0
        self._turn = 0
        self._last_turn: dict[Draws, int] = {}
        self._left = Event()

    async def take(self, role: str, worker: Draws) -> None:
        while self._working and self._holder != role:
            await self._left.wait()
        if self._holder != role:
            self._holder = role
            self._turn += 1
        self._working += 1
        if self._last_turn.get(worker, 0) != self._turn:
            self._last_turn[worker] = self._turn
            await self._loop.sleep_until(self._loop.now + worker.seconds("switch"))

    def leave(self) -> None:
        self._working -= 1
        if not self._working:
            self._left.notify()


class Outage(msgspec.Struct, frozen=True):
    """A span of virtual time in which no job of a stage makes progress: all engines or all scorers are away."""

    stage: Literal["generate", "score"]
    start_s: float
    seconds: float

    def takes(self, now: float, seconds: float) -> float:
        """Return the duration of a job that begins now and takes `seconds` without the outage."""
        begins, ends = max(now, self.start_s), self.start_s + self.seconds
        return seconds + (ends - begins if now + seconds > self.start_s and begins < ends else 0.0)


class DrawsWithOutage(Draws):
    """Service times of a worker, longer for jobs that an outage interrupts."""

    def __init__(self, name: str, seed: int, profile: Profile, outage: Outage, loop: VirtualTimeLoop) -> None:
        super().__init__(name, seed, profile)
        self._outage, self._loop = outage, loop

    def seconds(self, stage: str, units: float = 1) -> float:
        seconds = super().seconds(stage, units)
        return self._outage.takes(self._loop.now, seconds) if stage.startswith(self._outage.stage) else seconds


@dataclass
class World:
    """The state of one simulation.

    `bundle`: samples that are simulated as one; `config` counts in bundles, service times in samples. `shared` is None
    if every role has its own devices; `outage` is None without one. `rejected`: share of the groups whose samples all
    get the same reward."""

    config: Config
    profile: Profile
    plan: Plan
    coordinator: Coordinator
    loop: VirtualTimeLoop
    meters: Meters
    seed: int
    bundle: int
    shared: SharedDevices | None
    outage: Outage | None
    rejected: float

    taken: int = 0

    def count_groups(self, taken: int = 0) -> None:
        """Update the gauges after a call that may have admitted groups or freed slots.

        The trainer took `taken` more groups."""
        self.taken += taken
        admitted = self.coordinator.ledger.admitted
        released = self.config.trainer.groups_per_update * (self.coordinator.versions.held or 0)
        self.meters.reserved["replay"].set(admitted - self.taken)
        self.meters.reserved["slots"].set(admitted - released)

    def score(self, job: ScoreJob) -> Score:
        """Return a reward, which has no influence on any time but by the rejection of its group."""
        if not self.rejected or random.Random(f"{self.seed}/rejected/{job.group}").random() < self.rejected:
            return _SCORE
        return Score(float(job.sample))

    def draws(self, name: str) -> Draws:
        if self.outage is None:
            return Draws(name, self.seed, self.profile)
        return DrawsWithOutage(name, self.seed, self.profile, self.outage, self.loop)


@dataclass(slots=True)
class Window:
    """The measured part of the run, in virtual seconds; it opens and closes during the run."""

    opened: float = math.inf
    closed: float = math.inf

    @property
    def seconds(self) -> float:
        return self.closed - self.opened


@dataclass(slots=True)
class Stretches:
    """Seconds within the window, of periods that are reported when they are over."""

    window: Window
    seconds: float = 0.0

    def add(self, start: float, end: float) -> None:
        window = self.window
        if end > window.opened and start < window.closed:
            self.seconds += (end if end < window.closed else window.closed) - (
                start if start > window.opened else window.opened
            )


class Gauge:
    """A quantity that steps up and down: its mean over the window, and its largest value ever."""

    __slots__ = ("_clock", "_integral", "_since", "_window", "largest", "value")

    def __init__(self, window: Window, clock: Callable[[], float]) -> None:
        self._window = window
        self._clock = clock
        self._integral = 0.0
        self._since = clock()
        self.value = self.largest = 0

    def add(self, change: int) -> None:
        self.set(self.value + change)

    def set(self, value: int) -> None:
        now, window = self._clock(), self._window
        if now > window.opened and self._since < window.closed:
            self._integral += self.value * (min(now, window.closed) - max(self._since, window.opened))
        self._since = now
        self.value = value
        self.largest = max(self.largest, value)

    @property
    def mean(self) -> float:
        """Return the mean over the window, once it is closed."""
        self.set(self.value)
        return self._integral / self._window.seconds if self._window.seconds > 0 else 0.0


class Meters:
    """The meters of one simulation: `busy` and `waiting` seconds by role, `reserved` slots by buffer."""

    def __init__(self, clock: Callable[[], float], workers: dict[str, int], capacities: dict[str, int]) -> None:
        self._workers = workers
        self._capacities = capacities
        self.window = Window()
        self.busy = {role: Stretches(self.window) for role in workers}
        self.waiting = {role: Stretches(self.window) for role in workers}
        self.reserved = {buffer: Gauge(self.window, clock) for buffer in capacities}

    def fractions(self, role: str) -> dict[str, float]:
        """Return the fractions of the window that the role's workers spent working and waiting.

        They were `busy`, waited without input (`starved`), or waited without permission to generate more
        (`backpressured`: only engines, which need no input). The rest, up to 1, is pauses."""
        total = self._workers[role] * self.window.seconds
        busy, waiting = (periods[role].seconds / total if total > 0 else 0.0 for periods in (self.busy, self.waiting))
        starved, backpressured = (0.0, waiting) if role == "rollout" else (waiting, 0.0)
        return {"busy": busy, "starved": starved, "backpressured": backpressured}

    def occupancy(self, buffer: str, each: int = 1) -> Occupancy:
        """Return how full a buffer was; one slot of the simulation represents `each` slots of the job."""
        gauge = self.reserved[buffer]
        return Occupancy(self._capacities[buffer] * each, gauge.mean * each, gauge.largest * each)
