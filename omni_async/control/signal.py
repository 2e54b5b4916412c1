"""Decides whether a group of rewards carries any training signal, and how long a run may go on without."""

from __future__ import annotations

from collections.abc import Sequence

from omni_async.config.algorithm import Advantage
from omni_async.types import Score

# Slots' worth of groups that may end untrained one after the other, and no fewer groups than these.
_ROUNDS = 4
_GROUPS = 32


def has_signal(scores: Sequence[Score], *, each_scorer: bool = False) -> bool:
    """Return False when all rewards of the group are equal (or there are fewer than two): then every advantage is 0.

    With `each_scorer` the scorers' own values count too: advantages made per scorer may differ where the sums are
    equal."""
    columns = [[score.value for score in scores]]
    if each_scorer:
        columns += [list(column) for column in zip(*(score.values for score in scores), strict=True)]
    return any(len(column) > 1 and min(column) != max(column) for column in columns)


def is_worth_training(scores: Sequence[Score], advantage: Advantage) -> bool:
    """Return whether a complete group goes to the trainer, or is rejected because it has nothing to teach."""
    # Against the rewards its prompt had before, even a group of equal rewards has a signal.
    may_reject = advantage.drop_zero_variance and not advantage.track_prompts
    return not may_reject or has_signal(scores, each_scorer=advantage.aggregate != "rewards")


class Fruitless:
    """A counter of groups that ended one after the other without being trained.

    A run in which all do would never end."""

    def __init__(self, slots: int) -> None:
        self._most = max(_GROUPS, _ROUNDS * slots)
        self.in_a_row = 0

    def too_many(self) -> bool:
        """Count another group that ended. Returns whether that should end the run."""
        self.in_a_row += 1
        return self.in_a_row >= self._most

    def reset(self) -> None:
        """Start the count again: a group may be trained."""
        self.in_a_row = 0
