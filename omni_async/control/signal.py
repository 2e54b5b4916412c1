"""Does a group of rewards carry any training signal?"""

from __future__ import annotations

from collections.abc import Sequence


def has_signal(rewards: Sequence[float]) -> bool:
    """False when all rewards of the group are equal (or there are fewer than two): then every advantage is 0."""
    return len(rewards) > 1 and min(rewards) != max(rewards)
