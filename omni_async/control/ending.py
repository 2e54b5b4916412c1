"""Ends a run in two phases: closing, ended.

*Closing*: no worker gets work, and every wait returns nothing. *Ended*: the trainer has finished the current update
with `update_done` (its groups are trained, as in the checkpoint that follows) or has abandoned it. Groups that are
unfinished at that time are dropped; a run resumed from the checkpoint admits them again.
"""

from __future__ import annotations

from collections.abc import Callable

from omni_async.control.control_state import ControlState
from omni_async.control.events import EventLog
from omni_async.control.group_table import GroupTable
from omni_async.control.ledger import ConservationError
from omni_async.control.sample_table import SampleTable


class Ending:
    """The end of a run.

    `outcome` is its status and the reason, set when it begins to close. `state` is the control plane's state before
    groups were dropped, set when it has ended."""

    def __init__(
        self, groups: GroupTable, samples: SampleTable, log: EventLog, ledger_sync: Callable[[], None]
    ) -> None:
        self._groups = groups
        self._samples = samples
        self._log = log
        self._ledger_sync = ledger_sync
        self.outcome: tuple[str, str | None] | None = None
        self.state: ControlState | None = None

    def decide(self, status: str, reason: str | None) -> None:
        """Set the run's final status. Called once, when it begins to close."""
        assert self.outcome is None
        self.outcome = (status, reason)
        self._log.add("closing", {"status": status, "reason": reason})

    def drop_groups(self, state: ControlState) -> None:
        """Drop the remaining groups, and report the end.

        Called once, when the run is closing and the trainer has finished or abandoned its update."""
        assert self.outcome is not None
        self.state = state
        status, reason = self.outcome
        for group in self._groups.drop_all(f"run {status}" + (f": {reason}" if reason else "")):
            self._samples.end_samples(group)
        ledger = self._groups.ledger
        try:
            self._groups.check()
        except ConservationError as error:
            status, reason = "failed", str(error)
        problem = ledger.problem
        if status == "done":
            try:
                # If no update was left to make, the void lines of a former attempt are still in the file.
                self._ledger_sync()
            except OSError as error:
                problem = problem or f"the ledger cannot be written: {error}"
        if problem is not None and status != "failed":
            status, reason = "failed", problem
        self.outcome = (status, reason)
        self._log.add("ended", {"status": status, "reason": reason, "images": state.images, **ledger.summary()})
