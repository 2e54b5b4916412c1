"""Does a group of rewards carry any training signal?"""

from __future__ import annotations

from collections.abc import Sequence

from omni_async.types import Score


def has_signal(scores: Sequence[Score], *, each_scorer: bool = False) -> bool:
    """False when all rewards of the group are equal (or there are fewer than two): then every advantage is 0.

    With `each_scorer` the scorers' own values count too: advantages made per scorer may differ where the sums are equal.
    """
    columns = [[score.value for score in scores]]
    if each_scorer:
        columns += [list(column) for column in zip(*(score.values for score in scores), strict=True)]
    return any(len(column) > 1 and min(column) != max(column) for column in columns)
