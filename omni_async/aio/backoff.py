"""Computes pauses before retries, holds delayed calls, and decides whether to call a failing service.

Deterministic: no jitter. `Later` takes time from the event loop's timers. `Breaker` takes it from its clock; it owns no
task and never waits.
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

    They run on timers of the running loop; `cancel` and `cancel_all` drop them."""

    def __init__(self) -> None:
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._closed = False

    def call(self, name: str, seconds: float, callback: Callable[[], None]) -> None:
        """Call `callback` after a delay, unless it is cancelled; do nothing after `cancel_all`.

        Args:
            name: identifies the call for `cancel`; replaces a waiting call of the same name.
            seconds: the delay; at 0 or less, `callback` is called before this returns.
            callback: the function to call."""
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
        """Cancel all waiting calls, and ignore later ones."""
        self._closed = True
        self.cancel(list(self._timers))


class State(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


class Breaker:
    """A circuit breaker, which decides whether to call a service that keeps failing.

        closed ------ trip ------> open --- try_again, after a pause ---> half open
           ^                        ^                                        |
           |                        +--------------- missed -----------------+
           +------------------------ succeeded ------------------------------+

    While the breaker is open, the service is not called. While it is half open, one attempt is made. The pauses grow
    from one attempt to the next. `give_up_s` after it opened, the breaker has *given up*: attempts continue, but
    callers should no longer wait for them."""

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
