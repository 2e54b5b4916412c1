"""Bounds staleness with slots.

There are (S + 1) x P slots. A group takes one when it is admitted and gives it back when the update that trained it
is held by every engine, or when the group ended otherwise. A group admitted at version a therefore always meets a
trainer that is at most S updates further: everything in flight, the trained-but-not-yet-held included, fits into S + 1
updates.

Capacity is slots *held*, never a running count, so it survives rejections, resumes and restarts.
"""

from __future__ import annotations

from collections.abc import Set

from msgspec import Struct


class SlotStatistics(Struct, frozen=True):
    capacity: int
    live: int
    awaiting_publication: int

    @property
    def free(self) -> int:
        return self.capacity - self.live - self.awaiting_publication


class Slots:
    """The slots and the groups that hold them. Nothing waits here: a caller that needs a free slot asks again after
    `held` or `end`."""

    def __init__(self, max_updates: int, groups_per_update: int) -> None:
        self.capacity = (max_updates + 1) * groups_per_update
        self._live: set[int] = set()
        self._trained: dict[int, int] = {}

    @property
    def free(self) -> int:
        return self.capacity - len(self._live) - len(self._trained)

    @property
    def live(self) -> Set[int]:
        """Returns a view of the groups that were admitted and have not ended."""
        return self._live

    def take(self, group: int) -> None:
        if self.free <= 0:
            raise ValueError(f"no slot for group {group}: all {self.capacity} are held")
        if group in self._live or group in self._trained:
            raise ValueError(f"group {group} already holds a slot")
        self._live.add(group)

    def trained(self, group: int, version: int) -> None:
        """Marks the group as trained by the update that makes `version`; its slot waits for that version to be held."""
        self._live.remove(group)
        self._trained[group] = version

    def held(self, version: int) -> int:
        """Frees the slots of all groups trained up to `version`, which every live engine holds. Returns how many."""
        done = [group for group, trained in self._trained.items() if trained <= version]
        for group in done:
            del self._trained[group]
        return len(done)

    def end(self, group: int) -> None:
        """Frees the slot of a group that was rejected or dropped, at once."""
        self._live.remove(group)

    def statistics(self) -> SlotStatistics:
        return SlotStatistics(self.capacity, len(self._live), len(self._trained))
