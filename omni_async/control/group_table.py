"""Tracks every admitted group, from its slot to its terminal event. Pure bookkeeping: waits for nothing and sends no
messages.

A group is *live* from its admission until the trainer takes it, and *in training* until the trainer has answered for
its update. Each ends in exactly one line of the ledger: trained, rejected or dropped.
"""

from __future__ import annotations

from typing import Any

import msgspec

from omni_async.config import Config
from omni_async.control.admission import Slots
from omni_async.control.buffer import ReplayBuffer
from omni_async.control.control_state import Unfinished
from omni_async.control.groups import GroupProgress
from omni_async.control.ledger import Ledger
from omni_async.control.signal import Fruitless
from omni_async.types import ReadyGroup, Terminal, UpdateReport


class TooStale(RuntimeError):
    """A group reached the trainer beyond the staleness budget. Always a bug in omni_async."""


class GroupTable:
    def __init__(self, config: Config, run_id: str, ledger: Ledger, start_version: int) -> None:
        self._run_id = run_id
        self._budget = config.staleness.max_updates
        per_update = config.trainer.groups_per_update
        self._wanted = ledger.events["trained"] + (config.trainer.updates - start_version) * per_update
        self._replay = ReplayBuffer(
            config.buffer.groups, window=config.buffer.window, max_updates=self._budget, groups_per_update=per_update
        )
        self._training: dict[int, tuple[GroupProgress, ReadyGroup]] = {}
        # Groups returned by the trainer, which waits for them before it takes younger ones; None: not ready.
        self._returned: dict[int, ReadyGroup | None] = {}
        self.slots = Slots(self._budget, per_update)
        self._fruitless = Fruitless(self.slots.capacity)
        self.live: dict[int, GroupProgress] = {}
        self.ledger = ledger

    # ---- on the way to the trainer -----------------------------------------------------------------------------------

    @property
    def may_admit(self) -> bool:
        """Returns whether there is a slot, room downstream, and an update left that would train another group."""
        unfinished = len(self._training) + len(self.live)
        return (
            self.slots.free > 0 and self._replay.free > 0 and self.ledger.events["trained"] + unfinished < self._wanted
        )

    def admit(self, progress: GroupProgress) -> None:
        self.slots.take(progress.group)
        self._replay.reserve(progress.group, progress.admitted_version)
        self.ledger.admit(progress.group)
        self.live[progress.group] = progress

    def complete(self, progress: GroupProgress) -> None:
        """Hands the group to the trainer: every sample is scored."""
        self._fruitless.reset()
        if progress.group in self._returned:
            self._returned[progress.group] = progress.ready()
        else:
            self._replay.put(progress.ready())

    def incomplete(self, progress: GroupProgress) -> None:
        """Takes the group back from those that are ready: samples of it are gone."""
        if progress.group in self._returned:
            self._returned[progress.group] = None
        else:
            self._replay.unput(progress.group)

    def give_back(self, group: int) -> GroupProgress | None:
        """Makes a group live again that the trainer has taken and cannot read. Returns None if the trainer does not
        have it."""
        if group not in self._training:
            return None
        progress, _ = self._training.pop(group)
        self.live[group] = progress
        self._returned[group] = None
        return progress

    @property
    def all_ready(self) -> bool:
        """Returns whether every live group could be taken."""
        return self._replay.all_ready and None not in self._returned.values()

    def take(self, version: int, needed: int) -> ReadyGroup | None:
        """Returns the group that the update that starts from `version` and needs `needed` more groups should train
        next, if it is ready. Raises TooStale."""
        ready = self._take_returned() if self._returned else self._replay.take(version, needed)
        if ready is None:
            return None
        staleness = version - ready.oldest_version
        if staleness > self._budget:
            raise TooStale(
                f"group {ready.group} reached the trainer {staleness} updates old, the budget is {self._budget}"
            )
        self._training[ready.group] = (self.live.pop(ready.group), ready)
        return ready

    def _take_returned(self) -> ReadyGroup | None:
        """Returns a returned group that is ready. Younger groups wait for these: they would push them into a later
        update, and beyond the staleness budget."""
        for group, ready in self._returned.items():
            if ready is not None:
                del self._returned[group]
                return ready
        return None

    @property
    def in_training(self) -> bool:
        return bool(self._training)

    def state(self) -> tuple[tuple[Unfinished, ...], tuple[ReadyGroup, ...]]:
        """Returns the live groups that are not scored yet, and those that are, including those that the trainer has and
        leaves."""
        returned = (ready for ready in self._returned.values() if ready is not None)
        ready = (*(ready for _, ready in self._training.values()), *returned, *self._replay.ready())
        done = {group.group for group in ready}
        unfinished = tuple(Unfinished(one.group, one.attempts) for one in self.live.values() if one.group not in done)
        return unfinished, ready

    # ---- ends --------------------------------------------------------------------------------------------------------

    def trained(self, report: UpdateReport) -> list[ReadyGroup]:
        """Records that the update is made and returns its groups; their slots wait for the version to be held."""
        groups = []
        for number in report.groups:
            progress, ready = self._training.pop(number)
            groups.append(ready)
            self.slots.trained(number, report.version)
            self._record(progress, "trained", trained_version=report.version)
        self.check()
        return groups

    def end(self, progress: GroupProgress, event: Terminal, reason: str) -> str | None:
        """Rejects or drops a live group. Returns why the run should end, if too many have ended so in a row."""
        del self.live[progress.group]
        self._drop(progress, event, reason)
        self._replay.end(progress.group)
        self._returned.pop(progress.group, None)
        if not self._fruitless.too_many():
            return None
        return (
            f"{self._fruitless.in_a_row} groups in a row ended without being trained; the last one was {event}:"
            f" {reason}"
        )

    def drop_all(self, reason: str) -> None:
        """Drops all groups: the run is over, and the trainer will not answer for those it has any more."""
        for progress in [*(progress for progress, _ in self._training.values()), *self.live.values()]:
            self._drop(progress, "dropped", reason)
        self._training.clear()
        self._returned.clear()
        self.live.clear()

    def _drop(self, progress: GroupProgress, event: Terminal, reason: str) -> None:
        self._record(progress, event, reason)
        self.slots.end(progress.group)

    def _record(
        self, progress: GroupProgress, event: Terminal, reason: str | None = None, trained_version: int | None = None
    ) -> None:
        self.ledger.end(progress.entry(self._run_id, event, reason, trained_version))

    # ---- watching ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises ConservationError if the ledger and the slots disagree."""
        self.ledger.check(self.slots.live)

    def statistics(self) -> dict[str, dict[str, Any]]:
        return {
            "slots": msgspec.structs.asdict(self.slots.statistics()),
            "replay": msgspec.structs.asdict(self._replay.statistics()),
        }
