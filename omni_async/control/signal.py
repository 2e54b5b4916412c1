"""Does a group of rewards carry any training signal, and how long may a run go on without?"""

from __future__ import annotations

from collections.abc import Sequence

from omni_async.types import Score

# Slots' worth of groups that may end untrained one after the other, and no fewer groups than these.
_ROUNDS = 4
_GROUPS = 32


def has_signal(scores: Sequence[Score], *, each_scorer: bool = False) -> bool:
    """False when all rewards of the group are equal (or there are fewer than two): then every advantage is 0.

    With `each_scorer` the scorers' own values count too: advantages made per scorer may differ where the sums are
    equal.
    """
    columns = [[score.value for score in scores]]
    if each_scorer:
        columns += [list(column) for column in zip(*(score.values for score in scores), strict=True)]
    return any(len(column) > 1 and min(column) != max(column) for column in columns)


class Fruitless:
    """Groups that ended one after the other without being trained. A run in which all do would spin for ever."""

    def __init__(self, slots: int) -> None:
        self._most = max(_GROUPS, _ROUNDS * slots)
        self.in_a_row = 0

    def too_many(self) -> bool:
        """Another one ended; whether that should end the run."""
        self.in_a_row += 1
        return self.in_a_row >= self._most

    def reset(self) -> None:
        """A group may be trained."""
        self.in_a_row = 0
