"""Defines how long tests wait for real processes, threads and servers before they fail. No test passes by this time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE = 60.0
_PAUSE_S = 0.01


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Block until `condition` holds. AssertionError, with `what`, after PATIENCE seconds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {PATIENCE:g} s"
        time.sleep(_PAUSE_S)


async def until(condition: Callable[[], object], what: str) -> None:
    """Return once `condition` holds, while the event loop runs. AssertionError, with `what`, after PATIENCE seconds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {PATIENCE:g} s"
        await asyncio.sleep(_PAUSE_S)
