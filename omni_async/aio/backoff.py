"""Computes how long to wait before a retry, holds the calls that wait, and decides whether to ask at all.

Deterministic: no jitter. `Later` takes time from the event loop's timers, `Breaker`, which owns no task and waits for
nothing, from its clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from enum import Enum

from msgspec import Struct

from omni_async.aio.clock import Clock


class Backoff(Struct, frozen=True):
    """Pauses that double from `first_s` up to `longest_s` seconds."""

    first_s: float
    longest_s: float

    def pause_s(self, failures: int) -> float:
        """Return the pause in seconds after `failures` failures in a row, at least one."""
        # The exponent is bounded because 2.0**1024 is an error, and no pause needs it.
        return min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 64))


class Later:
    """Delayed calls, by name.

    They wait for timers of the running loop; `cancel` and `cancel_all` end the wait without the call."""

    def __init__(self) -> None:
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._closed = False

    def call(self, name: str, seconds: float, callback: Callable[[], None]) -> None:
        """Call back after a while, or never once all were cancelled.

        Args:
            name: by which `cancel` finds it; takes the place of a call of that name that waits.
            seconds: how long; 0 or less: it is called before this returns.
            callback: what to call."""
        if self._closed:
            return
        self.cancel([name])
        if seconds <= 0:
            callback()
            return
        self._timers[name] = asyncio.get_running_loop().call_later(seconds, self._due, name, callback)

    def _due(self, name: str, callback: Callable[[], None]) -> None:
        del self._timers[name]
        callback()

    def cancel(self, names: Iterable[str]) -> None:
        for name in names:
            if (timer := self._timers.pop(name, None)) is not None:
                timer.cancel()

    def cancel_all(self) -> None:
        """Cancel all calls that wait, and make none from now on."""
        self._closed = True
        self.cancel(list(self._timers))


class State(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


class Breaker:
    """A circuit breaker, which decides whether a service that keeps failing is asked at all.

        closed ------ trip ------> open --- try_again, after a pause ---> half open
           ^                        ^                                        |
           |                        +--------------- missed -----------------+
           +------------------------ succeeded ------------------------------+

    While it is open, the service is not asked. While it is half open, one attempt is made. The pauses grow from one
    attempt to the next, and `give_up_s` after it opened the breaker has *given up*: attempts go on, but no caller
    should wait for them any more."""

    def __init__(self, clock: Clock, *, pauses: Backoff, give_up_s: float) -> None:
        self._clock = clock
        self._pauses = pauses
        self._give_up_s = give_up_s
        self._attempts = 0
        self._opened = 0.0
        self._missed = 0.0
        self.state = State.CLOSED
        self.reason = ""  # of the last failure

    def succeeded(self) -> None:
        self.state = State.CLOSED

    def trip(self, reason: str) -> None:
        self._attempts = 0
        self._opened = self._clock.now()
        self.missed(reason)

    def try_again(self) -> None:
        self.state = State.HALF_OPEN

    def missed(self, reason: str) -> None:
        """Record that an attempt failed."""
        self.state = State.OPEN
        self.reason = reason
        self._attempts += 1
        self._missed = self._clock.now()

    @property
    def pause_s(self) -> float:
        """Return the pause between the last attempt and the next, in seconds."""
        return self._pauses.pause_s(self._attempts)

    @property
    def due(self) -> bool:
        """Return whether that pause is over."""
        return self._clock.now() - self._missed >= self.pause_s

    @property
    def open_s(self) -> float:
        return self._clock.now() - self._opened

    @property
    def given_up(self) -> bool:
        return self.state is not State.CLOSED and self.open_s >= self._give_up_s
