"""Measures what the roles and the buffers of a simulation do in the steady part of the run."""

from __future__ import annotations

import math
from collections.abc import Callable

from omni_async.simulation.result import Occupancy


class Window:
    """The part of the run that counts, in virtual seconds; it opens and closes while the run goes on."""

    def __init__(self) -> None:
        self.opened = math.inf
        self.closed = math.inf

    @property
    def seconds(self) -> float:
        return self.closed - self.opened


class Stretches:
    """Seconds that lie in the window, of periods reported when they are over."""

    __slots__ = ("_window", "seconds")

    def __init__(self, window: Window) -> None:
        self._window = window
        self.seconds = 0.0

    def add(self, start: float, end: float) -> None:
        window = self._window
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
        self.value = 0
        self.largest = 0

    def add(self, change: int) -> None:
        self.set(self.value + change)

    def set(self, value: int) -> None:
        now, window = self._clock(), self._window
        if now > window.opened and self._since < window.closed:
            self._integral += self.value * (min(now, window.closed) - max(self._since, window.opened))
        self._since = now
        self.value = value
        if value > self.largest:
            self.largest = value

    @property
    def mean(self) -> float:
        """Return the mean over the window, once that is closed."""
        self.set(self.value)
        return self._integral / self._window.seconds if self._window.seconds > 0 else 0.0


class Meters:
    """The meters of one simulation: `busy` and `waiting` seconds by role, `reserved` slots by buffer."""

    def __init__(self, clock: Callable[[], float], workers: dict[str, int], capacities: dict[str, int]) -> None:
        self._clock = clock
        self._workers = workers
        self._capacities = capacities
        self._window = Window()
        self.busy = {role: Stretches(self._window) for role in workers}
        self.waiting = {role: Stretches(self._window) for role in workers}
        self.reserved = {buffer: Gauge(self._window, clock) for buffer in capacities}

    def open(self) -> None:
        self._window.opened = self._clock()

    def close(self) -> None:
        self._window.closed = self._clock()

    def fractions(self, role: str) -> dict[str, float]:
        """Return the fractions of the window in which the role's workers worked, or waited.

        They were `busy`, waited without input (`starved`), or waited without permission to make more (`backpressured`:
        only engines, which need no input). The rest, up to 1, is pauses."""
        total = self._workers[role] * self._window.seconds
        busy, waiting = (periods[role].seconds / total if total > 0 else 0.0 for periods in (self.busy, self.waiting))
        starved, backpressured = (0.0, waiting) if role == "rollout" else (waiting, 0.0)
        return {"busy": busy, "starved": starved, "backpressured": backpressured}

    def occupancy(self, buffer: str, each: int = 1) -> Occupancy:
        """Return how full a buffer was; one slot of the simulation stands for `each` slots of the job."""
        gauge = self.reserved[buffer]
        return Occupancy(self._capacities[buffer] * each, gauge.mean * each, gauge.largest * each)
