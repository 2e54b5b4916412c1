"""Decides when the next group is admitted: when the trainer will need it, and not before.

The slots bound the age of a group. This policy keeps groups younger than the bound. If training is the slowest stage,
engines that take every free slot run S updates ahead, and each group waits that long for its turn.

The policy measures two times, from events that the coordinator handles anyway:

  lead   seconds that a group is made, from its admission to its last score, without waits for older groups
         (`omni_async.control.lead`); if the trainer collects an update, that all groups of the update are made
  work   seconds that the trainer works on an update, without its waits for groups

A group is due `ahead` seconds before the trainer needs it. `ahead` is the longest lead of recent updates: groups are
trained in the order of their admission, so one late group holds up the trainer. Memory spans a validation round, which
takes engines from training, unless rounds are far apart: the groups of all updates between would be older. With a fixed
reserve (`staleness.reserve`), `ahead` is the median lead and the trainer's work on so many groups.

Groups under way may be rejected. As many of them count as are left two standard deviations below the mean.

If another stage is the slowest, the trainer waits. Then as many groups are admitted as the trainer would need during a
lead if it never waited. The slowest stage stays busy, and groups do not queue at it.

A trainer whose groups are never rejected starves for at most the time by which its groups exceed `ahead`. `starved_s`
bounds the price of any cause: the trainer's waits that began while a group was withheld, and at most the time for which
each other stage could have taken another group.

Pure: waits for nothing and takes the time as an argument, in seconds of any clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from msgspec import Struct

from omni_async.config import Config
from omni_async.control.lead import Times, lead_s

_REMEMBERED = 16  # updates, or as many as are between two validation rounds if these are below 64
_LONGEST_MEMORY = 64
_FEWEST = 3  # measured updates before a group is withheld
_UNMEASURED = 3  # most updates' groups until then
_FAST = 0.1  # quantile of works: an update may be as short as this
_BEYOND = 0.5  # of the distance from the median to the longest lead: the next may be longer
_UNLUCKY = 2.0  # standard deviations that the number of groups not rejected may be below its mean
_MARGIN = 0.02  # of an update's work, for what happens between two events
_INSTANT_S = 1e-3  # two moments closer than this are one: a timer may fire a little early


class Pace(Struct, frozen=True):
    """The policy's measurements.

    `lead_s`: median lead. `work_s`: the trainer's work on an update. `reserve_s`: how much earlier than the median lead
    requires groups are admitted. `starved_s`: waits of the trainer in the update before that began while a group was
    withheld. The last two are 0 where nothing is withheld."""

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
        reserve, validation = config.staleness.reserve, config.validation
        every = 0 if validation is None else validation.every + 1
        updates = max(_REMEMBERED, every if every <= _LONGEST_MEMORY else 0)
        self._per_update = per_update = config.trainer.groups_per_update
        self._collects = collects
        self._withholds = withholds(config)
        self._reserve = reserve if isinstance(reserve, int) else None
        self._remembered = {False: updates * per_update, True: updates}  # leads, by `collects`
        self._leads: deque[float] = deque(maxlen=self._remembered[collects])
        self._works: deque[float] = deque(maxlen=_REMEMBERED)
        self._useful: deque[bool] = deque(maxlen=_REMEMBERED * per_update)  # of ended groups: taken, not rejected
        self._lead_s, self._ahead_s, self._work_s, self._yield = 0.0, 0.0, 0.0, 1.0
        # The update at hand.
        self._version = -1  # it starts from this version
        self._needed = per_update  # groups that it lacks
        self._asked = 0.0  # start of the trainer's wait
        self._given: float | None = None  # start of its work; None while it waits
        self._in_hand = 0  # groups taken since
        self._worked_s = 0.0
        self._taken: list[Times] = []
        # The price.
        self._withheld = False  # there is room that no group gets
        self._starves = False  # there was when the trainer's wait began
        self._starved_s = self._starved_before_s = 0.0
        self._spare_s: deque[tuple[float, ...]] = deque(maxlen=_REMEMBERED)  # when recent updates began

    # ---- events ------------------------------------------------------------------------------------------------------

    def trainer_collects(self, collects: bool) -> None:
        """Record how the trainer takes groups from now on. Leads measured before do not count."""
        if collects != self._collects:
            self._collects = collects
            self._leads = deque(maxlen=self._remembered[collects])

    def full(self) -> None:
        """Record that there is no room for another group."""
        self._withheld = False

    def ended(self) -> None:
        """Record that a group is rejected or dropped."""
        self._useful.append(False)

    def asked(self, version: int, needed: int, spare_s: tuple[float, ...], now: float) -> None:
        """Record that the trainer waits for groups.

        Args:
            version: The update starts from it.
            needed: how many groups it still needs.
            spare_s: of each other stage, for how many seconds so far nothing waited for it.
            now: the time."""
        if self._given is not None:
            self._worked_s += now - self._given
            self._given = None
        if version != self._version:
            if self._version >= 0:
                self._works.append(self._worked_s)
                self._learn(spare_s)
            self._version, self._worked_s = version, 0.0
            self._spare_s.append(spare_s)
        self._needed, self._asked, self._in_hand, self._starves = needed, now, 0, self._withheld

    def taken(self, group: Times, now: float) -> None:
        if self._given is None:
            self._given = now
            self._starved_s += now - self._asked if self._starves else 0.0
        self._needed -= 1
        self._in_hand += 1
        self._taken.append(group)
        self._useful.append(True)

    def _learn(self, spare_s: tuple[float, ...]) -> None:
        """Update the measurements at the end of an update."""
        # A stage for which samples always waited would not have been faster with another group.
        spared = [now - before for now, before in zip(spare_s, self._spare_s[0], strict=True)]
        self._starved_before_s, self._starved_s = min(self._starved_s, *spared), 0.0
        updates = [self._taken] if self._collects else [[group] for group in self._taken]
        self._leads.extend(lead for lead in map(lead_s, updates) if lead is not None)
        self._taken = []
        self._work_s = _quantile(sorted(self._works), _FAST)
        self._yield = sum(self._useful) / len(self._useful)
        if self._leads:
            leads = sorted(self._leads)
            self._lead_s, longest = _quantile(leads, 0.5), leads[-1]
            fixed = self._reserve
            if fixed is None:
                self._ahead_s = longest + _BEYOND * (longest - self._lead_s)
            else:
                self._ahead_s = self._lead_s + fixed * self._work_s / self._per_update

    # ---- the decision ------------------------------------------------------------------------------------------------

    @property
    def pace(self) -> Pace:
        if not self._withholds:
            return Pace(self._lead_s, self._work_s, 0.0, 0.0)
        return Pace(self._lead_s, self._work_s, self._ahead_s - self._lead_s, self._starved_before_s)

    def due(self, making: int, ready: int, now: float) -> float:
        """Return when the next group is due; `now`: at once, infinite: not before the next event.

        Called only if there is room for it.

        Args:
            making, ready: groups that the trainer has not taken, without and with all scores.
            now: the time."""
        due = self._due(making, ready, now) if self._withholds else now
        self._withheld = due > now + _INSTANT_S
        return due if self._withheld else now

    def _due(self, making: int, ready: int, now: float) -> float:
        if len(self._works) < _FEWEST or not self._leads:
            before = making + ready + self._per_update - self._needed
            return now if before < _UNMEASURED * self._per_update else math.inf
        # Groups that will be trained before it; any number of them may be rejected.
        useful = making * self._yield
        before = ready + max(0, int(useful - _UNLUCKY * math.sqrt(useful * (1 - self._yield))))
        each = self._work_s / self._per_update
        if not self._collects:
            free, later = self._in_hand * each, before * each
        elif before < self._needed:
            return now  # for the update that the trainer waits for
        else:
            free, later = self._work_s, (before - self._needed) // self._per_update * self._work_s
        if self._given is None:
            # The trainer waits, and works on what it gets first of all.
            free, later = now, later + (self._work_s if self._collects else 0.0)
        else:
            free += self._given
        due = free + later - self._ahead_s - _MARGIN * self._work_s
        # Beyond the moment when the trainer should be free, only an event shows when it is.
        return due if due <= free else math.inf


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def withholds(config: Config) -> bool:
    """Return whether groups are admitted just in time; otherwise whenever a slot is free.

    With S = 0 the trainer always needs them. `staleness.exact` needs every slot. Scoring that begins when no engine has
    a sample needs all samples at once (`reward.streaming: false`). Roles that share devices work in turn: an engine
    that gets groups one by one would take the devices from the trainer for each."""
    staleness, shared = config.staleness, config.placement.colocated
    whenever = staleness.max_updates == 0 or staleness.exact or staleness.reserve == "all"
    return not (whenever or shared or not config.reward.streaming)
