"""Keeps the part of a run's summary that its ledger does not have.

That is the mean reward of every update, and its validation rounds. A checkpoint keeps it too, so that a resumed run's
summary depends on no file that may have been removed or changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from omni_async.control.control_state import ControlState, Round


class Record:
    def __init__(self, start: ControlState) -> None:
        self._rewards = [*start.rewards]
        self._rounds = [*start.rounds]

    def updated(self, reward: float) -> None:
        """Add the mean reward of the update that was just made."""
        self._rewards.append(_finite(reward))

    def validated(self, version: int, means: Mapping[str, float]) -> None:
        """Add the round of `version`, whose `means` hold `reward` and the scorer's parts.

        Adds nothing if no sample of it could be scored."""
        if "reward" in means:
            parts = {name: _finite(value) for name, value in means.items()}
            self._rounds.append(Round(version, parts.pop("reward"), parts))

    @property
    def rewards(self) -> tuple[float | None, ...]:
        return tuple(self._rewards)

    def rounds(self, until: int | None) -> tuple[Round, ...]:
        """Return the rounds of versions up to `until`; a resumed run makes later ones again."""
        return () if until is None else tuple(round_ for round_ in self._rounds if round_.version <= until)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
