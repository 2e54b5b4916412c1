"""Gathers the input of alerts, from a run that was read whole or from one being followed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omni_async.control.rounds import Round
from omni_async.records.read.columns import Columns
from omni_async.records.read.follow import EVENTS, Follower
from omni_async.records.read.record import Run, RunStatus
from omni_async.records.read.rounds import in_order
from omni_async.records.write.attempts import Fault

_RECENT = 5  # updates whose median is a level
_ENDINGS = 200  # groups over which shares are computed


@dataclass(frozen=True)
class Seen:
    """The input of alerts.

    endings: (event, reason) of the groups that ended last, the newest at the end. told: the last message of a role to
    the run, for example that a scorer is down. now: seconds since the epoch."""

    updates: Columns
    endings: Sequence[tuple[str, str | None]] = ()
    faults: Sequence[Fault] = ()
    status: RunStatus = "done"
    told: str | None = None
    now: float = 0.0
    labels: tuple[str, ...] = ()  # of scorers
    validation: Sequence[Round] = ()

    def rewards(self, newest: int) -> npt.NDArray[np.float64]:
        """Return the rewards of the newest updates; empty for a run on preferences, which has no reward."""
        if "accuracy" in self.updates and "margin" in self.updates:
            return np.empty(0)
        rewards = self.updates.column("reward", newest)
        return rewards[np.isfinite(rewards)]

    def rounds_since(self, updates: int) -> npt.NDArray[np.float64]:
        """Return the validation rewards of versions among the newest `updates` updates.

        Leaves out rounds that scored other samples than the newest one: their means are not comparable."""
        first = self.updates.column("update", updates)[:1]
        known = [one for one in self.validation if one.version >= (first[0] if len(first) else 0.0)]
        alike = [one for one in known if one.may_be_best and one.same_samples(known[-1])]
        return np.array([one.reward for one in alike], np.float64)

    def last(self, name: str) -> float:
        """Return a metric of the newest update; 0 if it is missing."""
        values = self.updates.column(name, 1)
        return float(values[-1]) if len(values) else 0.0

    def measured(self, name: str) -> float | None:
        """Return the median of a metric over the newest updates that have it; None if no update has it."""
        values = self.updates.column(name)
        values = values[np.isfinite(values)][-_RECENT:]
        return float(np.median(values)) if len(values) else None

    def level(self, name: str) -> float | None:
        """Return the median of a metric in the newest updates; None if too few have it."""
        values = self.updates.column(name, _RECENT)
        values = values[np.isfinite(values)]
        return float(np.median(values)) if len(values) >= 3 else None


def seen_of_run(run: Run) -> Seen:
    """Return the input of alerts for a run that was read whole."""
    updates = Columns()
    for line in run.updates:
        updates.add(line)
    endings = [(entry.event, entry.reason) for entry in run.ledger[-_ENDINGS:]]
    return _seen(updates, run.validation, endings, run.faults, run.status, None, 0.0)


def seen_of(follower: Follower, status: RunStatus, told: str | None, now: float) -> Seen:
    """Return the input of alerts for a run that is being followed."""
    ended = follower.ended
    endings = [
        (EVENTS[row["event"]], None if row["reason"] < 0 else ended.reasons[row["reason"]])
        for row in ended.newest(_ENDINGS)
    ]
    validation = in_order(follower.rounds)
    return _seen(follower.updates, validation, endings, follower.faults, status, told, now)


def _seen(
    updates: Columns,
    validation: Sequence[Round],
    endings: Sequence[tuple[str, str | None]],
    faults: Sequence[Fault],
    status: RunStatus,
    told: str | None,
    now: float,
) -> Seen:
    labels = {name.split("/")[1] for name in updates if name.startswith("scorer/")}
    return Seen(updates, endings, faults, status, told, now, tuple(sorted(labels)), validation)
