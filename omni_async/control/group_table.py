"""Owns every live prompt group, and moves it from state to state (`omni_async.control.group`).

Pure bookkeeping: waits for nothing and calls only the ledger, an independent auditor that gets one line for the end of
every admitted group.

A transition releases everything that the old state held and the new state does not.

There are (S + 1) x P slots, and every group in the table has one. Everything in flight, including trained groups whose
version is not yet held, therefore fits into S + 1 updates: a group admitted at version a reaches a trainer that is at
most S updates further. Places are taken at admission. A ready group therefore never waits for a place, and the buffer
cannot fill with young groups while the trainer waits for the oldest.

Groups are taken in windowed admission order. `buffer.window` = 1 is strict first-in-first-out. With a larger window a
ready group may overtake up to `window - 1` older groups that are not ready, but only while every other untaken group
can still be trained within its own budget. Group g, admitted at version a, must be taken by update a + S. So before a
younger group takes a position in an update, enough positions must be left for all groups due by each later update.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

from omni_async.config import Config
from omni_async.control.control_state import Unfinished
from omni_async.control.group import (
    COMPLETE,
    END,
    GONE,
    GROUP_TRANSITIONS,
    MAKING,
    PUBLISH,
    READY,
    REMADE,
    REMAKING,
    RETURN,
    SPOIL,
    TAKE,
    TRAIN,
    TRAINED,
    TRAINING,
    Group,
    GroupEvent,
    GroupState,
)
from omni_async.control.ledger import Ledger
from omni_async.types import ReadyGroup, Terminal, UpdateReport

_HOLDS_PLACE = frozenset({MAKING, READY})
# A run ends if this many groups in a row, or four times the number of slots, end untrained: without this bound, a run
# whose groups all end untrained would never end.
_FRUITLESS = 32


class TooStale(RuntimeError):
    """A group reached the trainer beyond the staleness budget. Always a bug in omni_async."""


class GroupTable:
    """The table of live groups, by number, in the order of their admission.

    An example with S = 1 and P = 1, hence two slots. `held()` counts the slots and places that groups hold, and
    `report` is the trainer's report of the first update:

    >>> table.admit(first); table.admit(second); held()     # each takes a slot and a place
    (2, 2)
    >>> table.may_admit
    False
    >>> table.complete(first); held()                       # all its samples are scored: it may be taken
    (2, 2)
    >>> table.take(version=0, needed=1).group; held()       # frees the place
    0
    (2, 1)
    >>> print(table.take(version=1, needed=1))              # the second group is not complete
    None
    >>> table.trained(report) == [(first, ready)]; held()   # a line in the ledger; the slot waits for the publish
    True
    (2, 1)
    >>> table.publish(1); held()                            # every engine holds version 1: frees the slot
    (1, 1)
    >>> table.may_admit
    True
    """

    def __init__(self, config: Config, run_id: str, ledger: Ledger, start_version: int) -> None:
        self._run_id = run_id
        self._budget = config.staleness.max_updates
        self._per_update = config.trainer.groups_per_update
        self._window = config.buffer.window
        self._num_places = config.buffer.groups
        self._num_slots = config.slots
        self._wanted = ledger.events["trained"] + (config.trainer.updates - start_version) * self._per_update
        self._most_fruitless = max(_FRUITLESS, 4 * self._num_slots)
        self._num_fruitless = 0  # groups in a row that ended without being trained
        self.ledger = ledger
        self.groups: dict[int, Group] = {}
        # Indexes over `groups`: with a place in the replay buffer, and counts of these by version of admission.
        self._placed: OrderedDict[int, Group] = OrderedDict()
        self._admitted_at: Counter[int] = Counter()
        self._num: Counter[GroupState] = Counter()

    # ---- transitions -------------------------------------------------------------------------------------------------

    def _move(self, group: Group, event: GroupEvent) -> None:
        """Apply the transition table, and free what the group no longer holds. Raises ValueError."""
        before, after = group.state, GROUP_TRANSITIONS.get((group.state, event))
        if after is None:
            raise ValueError(f"group {group.number} is {before.name}: {event.name} cannot happen to it")
        group.state = after
        self._num[before] -= 1
        self._num[after] += 1
        if before in _HOLDS_PLACE and after not in _HOLDS_PLACE:
            del self._placed[group.number]
            self._admitted_at[group.admitted_version] -= 1
            if not self._admitted_at[group.admitted_version]:
                del self._admitted_at[group.admitted_version]
        if after is GONE:
            del self.groups[group.number]

    @property
    def live(self) -> set[int]:
        """Return the numbers of the groups that have not ended."""
        return {number for number, group in self.groups.items() if group.state is not TRAINED}

    @property
    def may_admit(self) -> bool:
        """Return whether there is a slot, a place, and an update left that would train another group."""
        num_groups = len(self.groups)
        return (
            num_groups < self._num_slots
            and len(self._placed) < self._num_places
            and self.ledger.events["trained"] + num_groups - self._num[TRAINED] < self._wanted
        )

    @property
    def untaken(self) -> tuple[int, int]:
        """Return the numbers of groups that the trainer has not taken: without all scores, and ready."""
        ready = self._num[READY]
        return len(self._placed) - ready, ready

    def admit(self, group: Group) -> None:
        """Give the group a slot and a place. Raises ValueError if none is free."""
        if len(self.groups) >= self._num_slots or len(self._placed) >= self._num_places:
            raise ValueError(
                f"no room for group {group.number}: {len(self.groups)} of {self._num_slots} slots and"
                f" {len(self._placed)} of {self._num_places} places are held"
            )
        self.ledger.admit(group.number)
        self.groups[group.number] = self._placed[group.number] = group
        self._admitted_at[group.admitted_version] += 1
        self._num[MAKING] += 1

    def complete(self, group: Group) -> None:
        """Hand a fully scored group to the trainer."""
        self._num_fruitless = 0
        group.ready = group.make_ready()
        self._move(group, COMPLETE)

    def spoil(self, group: Group) -> bool:
        """Stop a group from being trained before its lost samples are regenerated.

        Returns False if the trainer already has it; the trainer reports if it cannot read it."""
        if group.state in (TRAINING, TRAINED):
            return False
        group.ready = None
        if group.state in (READY, REMADE):
            self._move(group, SPOIL)
        return True

    def give_back(self, number: int) -> Group | None:
        """Take back a group that the trainer has and cannot read. Returns None if the trainer does not have it."""
        group = self.groups.get(number)
        if group is None or group.state is not TRAINING:
            return None
        group.ready = None
        group.losses += 1
        self._move(group, RETURN)
        return group

    # ---- training ----------------------------------------------------------------------------------------------------

    @property
    def all_ready(self) -> bool:
        """Return whether no group waits for samples, so that the trainer could take every remaining group."""
        return not self._num[MAKING] and not self._num[REMAKING]

    @property
    def in_training(self) -> bool:
        return self._num[TRAINING] > 0

    def take(self, version: int, needed: int) -> ReadyGroup | None:
        """Return the group that an update should train next, if it is ready. Raises TooStale.

        The update starts from `version` and needs `needed` more groups."""
        group = self._next(version, needed)
        if group is None:
            return None
        assert group.ready is not None
        staleness = version - group.ready.oldest_version
        if staleness > self._budget:
            raise TooStale(
                f"group {group.number} reached the trainer {staleness} updates old, the budget is {self._budget}"
            )
        self._move(group, TAKE)
        return group.ready

    def _next(self, update: int, needed: int) -> Group | None:
        if self._num[REMAKING] or self._num[REMADE]:
            # Younger groups must not overtake these: that would delay them beyond the staleness budget.
            return next((group for group in self.groups.values() if group.state is REMADE), None)
        for overtaken, group in enumerate(self._placed.values()):
            if overtaken >= self._window:
                return None
            if group.state is READY and (overtaken == 0 or self._others_stay_in_time(group, update, needed - 1)):
                return group
        return None

    def _others_stay_in_time(self, taken: Group, update: int, positions: int) -> bool:
        """Return whether all groups due by each update still fit into the positions up to it."""
        due = 0
        for version in sorted(self._admitted_at):
            others = self._admitted_at[version] - (version == taken.admitted_version)
            due += others
            if others and due > positions + (version + self._budget - update) * self._per_update:
                return False
        return True

    def trained(self, report: UpdateReport) -> list[tuple[Group, ReadyGroup]]:
        """Record a finished update and return its groups; their slots wait until all engines hold the version."""
        trained = []
        for group in [self.groups[number] for number in report.groups]:
            self._move(group, TRAIN)
            group.trained_version = report.version
            self.ledger.end(group.entry(self._run_id, "trained", None))
            assert group.ready is not None
            trained.append((group, group.ready))
            group.ready = None  # only its slot is left
        self.check()
        return trained

    def publish(self, version: int) -> None:
        """Free the slots of all groups trained up to `version`, which every live engine holds."""
        for group in [*self.groups.values()]:
            if group.trained_version is not None and group.trained_version <= version:
                self._move(group, PUBLISH)

    # ---- ends --------------------------------------------------------------------------------------------------------

    def end(self, group: Group, event: Terminal, reason: str) -> str | None:
        """Reject or drop a group.

        Args:
            group: a group that is not trained.
            event: `rejected` or `dropped`.
            reason: the cause, for the ledger.

        Returns:
            Why the run should end, if too many groups in a row have ended untrained; else None."""
        self._move(group, END)
        self.ledger.end(group.entry(self._run_id, event, reason))
        self._num_fruitless += 1
        if self._num_fruitless < self._most_fruitless:
            return None
        return f"{self._num_fruitless} groups in a row ended without being trained; the last one was {event}: {reason}"

    def drop_all(self, reason: str) -> list[Group]:
        """Drop and return all groups, the trainer's included, because the run is over."""
        dropped = [group for group in self.groups.values() if group.state is not TRAINED]
        for group in dropped:
            self._move(group, END)
            self.ledger.end(group.entry(self._run_id, "dropped", reason))
        return dropped

    # ---- watching ----------------------------------------------------------------------------------------------------

    def state(self) -> tuple[tuple[Unfinished, ...], tuple[ReadyGroup, ...]]:
        """Return the groups that are not complete yet, and the complete groups, the trainer's included."""
        live = [group for group in self.groups.values() if group.state is not TRAINED]
        unfinished = tuple(Unfinished(group.number, group.attempts) for group in live if group.ready is None)
        return unfinished, tuple(group.ready for group in live if group.ready is not None)

    def check(self) -> None:
        """Raise ConservationError if the ledger and the table disagree."""
        self.ledger.check(self.live)

    def statistics(self) -> dict[str, dict[str, Any]]:
        waiting = self._num[TRAINED]
        live = len(self.groups) - waiting
        return {
            "slots": {"capacity": self._num_slots, "live": live, "awaiting_publication": waiting},
            "replay": {"capacity": self._num_places, "reserved": len(self._placed), "ready": self._num[READY]},
        }
