"""Implements a circuit breaker, which decides whether a service that keeps failing is asked at all.

Pure bookkeeping; it owns no task and waits for nothing.

    closed ------ trip ------> open --- try_again, after a pause ---> half open
       ^                        ^                                        |
       |                        +--------------- missed -----------------+
       +------------------------ succeeded ------------------------------+

While it is open, the service is not asked. While it is half open, one attempt is made. The pauses grow from one attempt
to the next, and `give_up_s` after it opened the breaker has *given up*: attempts go on, but no caller should wait for
them any more.
"""

from __future__ import annotations

from enum import Enum

from omni_async.aio.backoff import Backoff
from omni_async.aio.clock import Clock


class State(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


class Breaker:
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
        self.state = State.OPEN
        self.reason = reason
        self._attempts = 1
        self._opened = self._missed = self._clock.now()

    def try_again(self) -> None:
        self.state = State.HALF_OPEN

    def missed(self, reason: str) -> None:
        """Record that the attempt failed too."""
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
