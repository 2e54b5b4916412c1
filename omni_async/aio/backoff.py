"""Computes how long to wait before a retry, and holds the calls that wait for that time.

Deterministic: no jitter, time from the event loop's timers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from msgspec import Struct


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

    They wait for timers of the running loop; `cancel` and `close` end the wait without the call."""

    def __init__(self) -> None:
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._closed = False

    def call(self, name: str, seconds: float, callback: Callable[[], None]) -> None:
        """Call `callback` after `seconds`: at once if there is nothing to wait for, never after `close`."""
        if self._closed:
            return
        if seconds <= 0:
            callback()
            return
        self.cancel([name])
        self._timers[name] = asyncio.get_running_loop().call_later(seconds, self._due, name, callback)

    def _due(self, name: str, callback: Callable[[], None]) -> None:
        del self._timers[name]
        callback()

    def cancel(self, names: Iterable[str]) -> None:
        for name in names:
            if (timer := self._timers.pop(name, None)) is not None:
                timer.cancel()

    def close(self) -> None:
        self._closed = True
        self.cancel(list(self._timers))

    def __len__(self) -> int:
        return len(self._timers)
