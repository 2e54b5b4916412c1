"""How long a test waits for something that a healthy machine does at once.

The bound only ends a test that hangs. A busy machine stalls a process for seconds, so a shorter bound fails by chance.
"""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 60.0  # seconds


def until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Wait, in a thread, until the condition holds. AssertionError once patience is over."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"{what} did not come about within {PATIENCE:g} s"
        time.sleep(0.01)
