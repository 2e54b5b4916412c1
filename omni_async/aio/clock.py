"""Defines injected time, so that the same control plane runs against a wall clock, in tests and in virtual time."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Return seconds since the epoch (of the run's world, virtual or real)."""


class WallClock:
    def now(self) -> float:
        return time.time()


class LoopClock:
    """The time of the running event loop's timers, from an arbitrary origin; virtual on a virtual loop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()


class ManualClock:
    """A clock that moves only by `advance`."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time only moves forward, got {seconds}")
        self._now += seconds
