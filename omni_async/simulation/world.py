"""Holds what the roles of one simulation share: the job, the service times, the coordinator, the clock, the meters."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from omni_async.actors.plan import Plan
from omni_async.aio.waiting import Event
from omni_async.config import Config
from omni_async.control.coordinator import Coordinator
from omni_async.performance.emulation import Draws
from omni_async.performance.profile import Profile
from omni_async.simulation.meters import Meters
from omni_async.simulation.virtual_time import VirtualTimeLoop

T = TypeVar("T")


def digest_of(version: int) -> str:
    """Return the digest of a version, which has no weights here."""
    return f"version {version}"


def at_once(call: Coroutine[Any, Any, T]) -> T:
    """Return the result of a call of the coordinator that does not wait, for callers that are no coroutines.

    Raises RuntimeError if it would wait."""
    try:
        call.send(None)
    except StopIteration as finished:
        return finished.value
    call.close()
    raise RuntimeError(f"{call} waits")


class SharedDevices:
    """Devices that the roles use in turns.

    A role has them while any of its workers works; then the role that asked first gets them. Every worker takes the
    profile's `switch` when it first works after its role got the devices back.

    `take` waits for the other roles' work to end; unblocked by `leave`."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._loop = loop
        self._holder = "trainer"  # which made the version that the engines wait for
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


@dataclass
class World:
    """The state of one simulation.

    `bundle`: samples that are simulated as one; `config` counts in bundles, service times in samples. `shared` is None
    where every role has devices of its own."""

    config: Config
    profile: Profile
    plan: Plan
    coordinator: Coordinator
    loop: VirtualTimeLoop
    meters: Meters
    seed: int
    bundle: int
    shared: SharedDevices | None

    taken: int = 0

    def count_groups(self, taken: int = 0) -> None:
        """Update the gauges after a call that may have admitted groups or freed slots.

        The trainer took `taken` more."""
        self.taken += taken
        admitted, released = (
            self.coordinator.ledger.admitted,
            self.config.trainer.groups_per_update * (self.coordinator.versions.held or 0),
        )
        self.meters.reserved["replay"].set(admitted - self.taken)
        self.meters.reserved["slots"].set(admitted - released)

    def draws(self, name: str) -> Draws:
        return Draws(name, self.seed, self.profile)
