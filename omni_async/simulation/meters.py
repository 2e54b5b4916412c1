"""What is measured while a simulation runs: who works and who waits, and how full the buffers are, in the steady part
of the run."""

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
    """Seconds that lie in the window, of stretches of time reported when they are over."""

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

    __slots__ = ("_clock", "_since", "_stretches", "_window", "largest", "value")

    def __init__(self, window: Window, clock: Callable[[], float]) -> None:
        self._window = window
        self._clock = clock
        self._stretches = 0.0
        self._since = clock()
        self.value = 0
        self.largest = 0

    def add(self, change: int) -> None:
        self.set(self.value + change)

    def set(self, value: int) -> None:
        now, window = self._clock(), self._window
        if now > window.opened and self._since < window.closed:
            self._stretches += self.value * (min(now, window.closed) - max(self._since, window.opened))
        self._since = now
        self.value = value
        if value > self.largest:
            self.largest = value

    @property
    def mean(self) -> float:
        """Once the window is closed."""
        self.set(self.value)
        return self._stretches / self._window.seconds if self._window.seconds > 0 else 0.0


class Meters:
    """`busy` and `waiting` by role, `places` by buffer."""

    def __init__(self, clock: Callable[[], float], workers: dict[str, int], capacities: dict[str, int]) -> None:
        self._clock = clock
        self._workers = workers
        self._capacities = capacities
        self._window = Window()
        self.busy = {role: Stretches(self._window) for role in workers}
        self.waiting = {role: Stretches(self._window) for role in workers}
        self.places = {buffer: Gauge(self._window, clock) for buffer in capacities}

    def open(self) -> None:
        self._window.opened = self._clock()

    def close(self) -> None:
        self._window.closed = self._clock()

    def fractions(self, role: str) -> dict[str, float]:
        """Of the window: what the role's workers were `busy`, and waited without input (`starved`) or without leave to
        make more (`backpressured`: only engines, which make things out of nothing). What is left of 1: pauses between
        the two."""
        total = self._workers[role] * self._window.seconds
        busy, waiting = (
            stretches[role].seconds / total if total > 0 else 0.0 for stretches in (self.busy, self.waiting)
        )
        starved, backpressured = (0.0, waiting) if role == "rollout" else (waiting, 0.0)
        return {"busy": busy, "starved": starved, "backpressured": backpressured}

    def occupancy(self, buffer: str, each: int = 1) -> Occupancy:
        """`each`: what one place of the simulation stands for."""
        gauge = self.places[buffer]
        return Occupancy(self._capacities[buffer] * each, gauge.mean * each, gauge.largest * each)
