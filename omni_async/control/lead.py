"""Measures the lead of a group: how long it is made, without the time that it waits for older groups.

An older group may occupy engines or reward workers. A younger group that waits for it could be admitted later and would
be ready just as early. So this wait is no reason for an earlier admission. All other waits count, such as those for a
validation round or for the end of an outage.

Engines and reward workers both take the oldest group first. So a group that waits while a stage has training samples
waits for an older group.
"""

from __future__ import annotations

from collections.abc import Sequence


class Stage:
    """Engines or reward workers: how many samples of a kind wait for them, and how many they have.

    `empty_since`: when they last had none."""

    __slots__ = ("_spare_s", "_spare_since", "empty_since", "num_samples", "num_waiting")

    def __init__(self) -> None:
        self.num_waiting = self.num_samples = 0
        self.empty_since = self._spare_since = self._spare_s = 0.0

    def change(self, waiting: int, samples: int, now: float) -> None:
        """Add to the numbers of samples that wait, and that the stage has."""
        if waiting:
            self._spare_s, self._spare_since = self.spare_s(now), now
            self.num_waiting += waiting
        if samples:
            self.num_samples += samples
            if not self.num_samples:
                self.empty_since = now

    def free(self, since: float, now: float) -> float:
        """Return when the stage was free for a group that has waited since a moment and starts now."""
        return now if self.num_samples else max(since, self.empty_since)

    def spare_s(self, now: float) -> float:
        """Return for how many seconds so far no sample waited."""
        return self._spare_s if self.num_waiting else self._spare_s + now - self._spare_since


class Times:
    """Moments of a group, in seconds of any clock; None until they are known.

    `admitted`. `begun`: engines were free for it. `generated`: its first and its last sample so far. `behind_s`: the
    wait of its first generated sample for older groups' samples at the reward workers. `ready`: its last score."""

    __slots__ = ("admitted", "begun", "behind_s", "first_generated", "last_generated", "ready")

    def __init__(self) -> None:
        self.admitted = 0.0
        self.begun: float | None = None
        self.first_generated: float | None = None
        self.last_generated = 0.0
        self.behind_s: float | None = None
        self.ready = 0.0

    def leased(self, engines: Stage, now: float) -> None:
        if self.begun is None:
            self.begun = engines.free(self.admitted, now)

    def generated(self, now: float) -> None:
        if self.first_generated is None:
            self.first_generated = now
        self.last_generated = now

    def handed_out(self, workers: Stage, now: float) -> None:
        if self.behind_s is None and self.first_generated is not None:
            self.behind_s = workers.free(self.first_generated, now) - self.first_generated


def lead_s(groups: Sequence[Times]) -> float | None:
    """Return the seconds from the begin of the first of these groups until all are ready; None if they are unknown.

    Groups that an earlier attempt of the run has made have no times, and do not count."""
    made = [times for times in groups if times.begun is not None and times.behind_s is not None]
    if not made:
        return None
    begun = min(times.begun for times in made if times.begun is not None)
    first = min(made, key=lambda times: times.first_generated or 0.0)
    ready, generated = max(times.ready for times in made), max(times.last_generated for times in made)
    return max(ready - (first.behind_s or 0.0), generated) - begun
