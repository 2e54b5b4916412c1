"""Keeps how a run ends, in two steps.

*Closing*: no worker gets work, and every wait returns nothing. *Ended*: the trainer has answered for the update under
way, by `update_done` (its groups are trained, as the checkpoint that follows has them) or by leaving it; groups
unfinished then are dropped, though a run resumed from the checkpoint admits them again.
"""

from __future__ import annotations

from collections.abc import Callable

from omni_async.control.control_state import ControlState
from omni_async.control.events import EventLog
from omni_async.control.group_table import Group, GroupTable
from omni_async.control.ledger import ConservationError


class Ending:
    """The end of a run.

    `outcome` is its status and the reason, once it is closing; `state` the control plane before groups were dropped,
    once it has ended."""

    def __init__(self, groups: GroupTable, log: EventLog, ledger_sync: Callable[[], None]) -> None:
        self._groups = groups
        self._log = log
        self._ledger_sync = ledger_sync
        self.outcome: tuple[str, str | None] | None = None
        self.state: ControlState | None = None

    @property
    def closed(self) -> bool:
        return self.outcome is not None

    @property
    def ended(self) -> bool:
        return self.state is not None

    def close(self, status: str, reason: str | None) -> bool:
        """Decide how the run ends. Returns whether that was open."""
        if self.closed:
            return False
        self.outcome = (status, reason)
        self._log.add("closing", {"status": status, "reason": reason})
        return True

    def end(self, state: ControlState) -> list[Group]:
        """Drop the groups that are left and return them, and report the end.

        Called once, when the run is closing and the trainer has answered."""
        assert self.outcome is not None
        self.state = state
        status, reason = self.outcome
        dropped = self._groups.drop_all(f"run {status}" + (f": {reason}" if reason else ""))
        try:
            self._groups.check()
        except ConservationError as error:
            self.outcome = ("failed", str(error))
        problem = self._groups.ledger.problem
        if self.outcome[0] == "done":
            try:
                # Where no update was left to make, nothing has made the lines of a former attempt void yet.
                self._ledger_sync()
            except OSError as error:
                problem = problem or f"the ledger cannot be written: {error}"
        if problem is not None and self.outcome[0] != "failed":
            self.outcome = ("failed", problem)
        status, reason = self.outcome
        summary = self._groups.ledger.summary()
        self._log.add("ended", {"status": status, "reason": reason, "images": state.images, **summary})
        return dropped
