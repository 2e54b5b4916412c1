"""Decides when the next group is admitted: when the trainer will need it, and not before.

The slots bound the age of a group. This policy keeps groups younger than the bound. If training is the slowest stage,
engines that take every free slot run S updates ahead, and each group waits that long for its turn.

The policy measures two times, from events that the coordinator handles anyway:

  lead   seconds from the first lease of a group until its last score; if the trainer collects an update, from the first
         lease of the update's groups until the last score
  work   seconds that the trainer works on an update, without its waits for groups

A group is due `lead` seconds before the trainer needs it. A trainer that waits needs a group at once, so if another
stage is the slowest, engines take every slot as before. Time in the queue for an engine does not count as lead:
otherwise a longer queue would raise the lead, and the lead the queue.

The reserve is how much earlier than the median lead requires a group is admitted (`staleness.reserve`): a number of
groups, or the distance to the 90th percentile of recent leads plus the trainer's recent waits. Each wait counts in full
at first and a tenth less with every update. If the trainer waits again and again, it is not the slowest stage, and soon
nothing is withheld. `starved_s` is the price of a small reserve: seconds that the trainer waited for a group which had
a free slot earlier.

Pure: waits for nothing and takes the time as an argument, in seconds of any clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from msgspec import Struct

from omni_async.config import Config

_REMEMBERED = 16  # updates
_FEWEST = 3  # measured updates before a group is withheld
_UNMEASURED = 3  # most updates' groups until then
_HIGH = 0.9  # quantile of leads that the reserve covers; works count by the opposite quantile
_INSTANT_S = 1e-3  # two moments closer than this are one: a timer may fire a little early
_KEPT = 0.9  # of the waits that the reserve covers, from one update to the next
_MARGIN = 0.02  # of an update's work, for what happens between two events


class Pace(Struct, frozen=True):
    """The policy's measurements.

    `lead_s`: median lead. `work_s`: the trainer's work on an update. `reserve_s`: how much earlier than the lead
    requires groups are admitted. `starved_s`: wait of the trainer since the last update that this cost."""

    lead_s: float
    work_s: float
    reserve_s: float
    starved_s: float


class JustInTime:
    def __init__(self, config: Config, *, collects: bool) -> None:
        """Start without measurements.

        Args:
            config: the job.
            collects: The trainer starts an update once it has all its groups; otherwise with each group."""
        reserve = config.staleness.reserve
        self._per_update = per_update = config.trainer.groups_per_update
        self._most_updates = config.staleness.max_updates + 1
        self._collects = collects
        self._withholds = withholds(config)
        self._fixed = reserve if isinstance(reserve, int) else None
        self._leads: deque[float] = deque(maxlen=_REMEMBERED if collects else _REMEMBERED * per_update)
        self._works: deque[float] = deque(maxlen=_REMEMBERED)
        self._useful: deque[bool] = deque(maxlen=_REMEMBERED * per_update)  # of ended groups: taken, not rejected
        self._lead_s, self._reserve_s, self._work_s, self._yield = 0.0, 0.0, 0.0, 1.0
        # Of groups that the trainer has not taken.
        self._leased: dict[int, float] = {}  # first lease
        self._ready: dict[int, float] = {}  # last score
        self._withheld: dict[int, float] = {}  # seconds between the first moment with room for it and its admission
        self._since: float | None = None  # since when there is room that no group gets
        # The update at hand.
        self._version = -1  # it starts from this version
        self._needed = per_update  # groups that it lacks
        self._asked = 0.0  # start of the trainer's wait
        self._given: float | None = None  # start of its work; None while it waits
        self._in_hand = 0  # groups taken since
        self._worked_s = 0.0
        self._waited_s = self._recent_waits_s = 0.0
        self._starved_s = self._starved_before_s = 0.0
        self._spans: list[tuple[float, float]] = []

    # ---- events ------------------------------------------------------------------------------------------------------

    def admitted(self, group: int, now: float) -> None:
        if self._since is not None:
            self._withheld[group] = now - self._since

    def full(self) -> None:
        """Record that there is no room for another group."""
        self._since = None

    def leased(self, groups: Iterable[int], now: float) -> None:
        for group in groups:
            self._leased.setdefault(group, now)

    def completed(self, group: int, now: float) -> None:
        self._ready[group] = now

    def ended(self, group: int) -> None:
        """Record that a group is rejected or dropped."""
        self._forget(group)
        self._useful.append(False)

    def asked(self, version: int, needed: int, now: float) -> None:
        """Record that the trainer waits for `needed` groups of the update that starts from `version`."""
        if self._given is not None:
            self._worked_s += now - self._given
            self._given = None
        if version != self._version:
            if self._version >= 0:
                self._works.append(self._worked_s)
                self._learn()
            self._version, self._worked_s = version, 0.0
        self._needed, self._asked, self._in_hand = needed, now, 0

    def taken(self, group: int, now: float) -> None:
        if self._given is None:
            self._given = now
            self._waited_s += now - self._asked
            self._starved_s += min(now - self._asked, self._withheld.get(group, 0.0))
        self._needed -= 1
        self._in_hand += 1
        if group in self._leased and group in self._ready:
            self._spans.append((self._leased[group], self._ready[group]))
        self._forget(group)
        self._useful.append(True)

    def _forget(self, group: int) -> None:
        for each in (self._leased, self._ready, self._withheld):
            each.pop(group, None)

    def _learn(self) -> None:
        """Update the measurements at the end of an update."""
        self._starved_before_s, self._starved_s = self._starved_s, 0.0
        if self._spans and self._collects:
            self._leads.append(max(ready for _, ready in self._spans) - min(leased for leased, _ in self._spans))
        else:
            self._leads.extend(ready - leased for leased, ready in self._spans)
        self._spans = []
        self._work_s = _quantile(sorted(self._works), 1 - _HIGH)
        self._yield = sum(self._useful) / len(self._useful)
        waited_s, self._waited_s = self._waited_s, 0.0
        if len(self._works) < _FEWEST:
            waited_s = 0.0  # for the first groups of all, which nothing can have ready
        self._recent_waits_s = min(_KEPT * self._recent_waits_s + waited_s, self._most_updates * self._work_s)
        if self._leads:
            leads = sorted(self._leads)
            self._lead_s = _quantile(leads, 0.5)
            if self._fixed is None:
                self._reserve_s = _quantile(leads, _HIGH) - self._lead_s + self._recent_waits_s
            else:
                self._reserve_s = self._fixed * self._work_s / self._per_update

    # ---- the decision ------------------------------------------------------------------------------------------------

    @property
    def pace(self) -> Pace:
        return Pace(self._lead_s, self._work_s, self._reserve_s, self._starved_before_s)

    def due(self, making: int, ready: int, now: float) -> float:
        """Return when the next group is due; `now`: at once, infinite: after the next event.

        Called only if there is room for it.

        Args:
            making, ready: groups that the trainer has not taken, without and with all scores.
            now: the time."""
        if not self._withholds:
            return now
        due = self._due(making, ready, now)
        if due <= now + _INSTANT_S:
            return now
        if self._since is None:
            self._since = now
        return due

    def _due(self, making: int, ready: int, now: float) -> float:
        if len(self._works) < _FEWEST or not self._leads:
            before = making + ready + self._per_update - self._needed
            return now if before < _UNMEASURED * self._per_update else math.inf
        before = ready + int(making * self._yield)  # groups that will be trained before it
        if self._collects:
            if before < self._needed:
                return now
            updates = 1 + (before - self._needed) // self._per_update
            needed_at = (now if self._given is None else self._given) + updates * self._work_s
        else:
            each = self._work_s / self._per_update
            free = now if self._given is None else self._given + self._in_hand * each
            needed_at = free + before * each
        return needed_at - self._lead_s - self._reserve_s - _MARGIN * self._work_s


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def withholds(config: Config) -> bool:
    """Return whether groups are admitted just in time; otherwise whenever a slot is free.

    With S = 0 the trainer always needs them. `staleness.exact` needs every slot. Roles that share devices work in
    turn: an engine that gets groups one by one would take the devices from the trainer for each."""
    staleness = config.staleness
    return not (
        staleness.max_updates == 0 or staleness.exact or staleness.reserve == "all" or config.placement.colocated
    )
