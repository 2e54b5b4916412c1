"""Ctrl-C and SIGTERM as an event that a run can wait for."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.asynccontextmanager
async def interrupts() -> AsyncIterator[asyncio.Event]:
    """SIGINT and SIGTERM set the event; a second one falls through to Python's own handling."""
    event = asyncio.Event()
    listen(event)
    try:
        yield event
    finally:
        _leave()


def listen(event: asyncio.Event) -> None:
    """Again after Ray has started: it takes SIGTERM for itself, and dies of it. Nothing once the event is set."""
    if event.is_set():
        return

    def ring() -> None:
        event.set()
        _leave()

    for number in _SIGNALS:
        with contextlib.suppress(RuntimeError, ValueError):  # not in the main thread: nobody can interrupt us
            asyncio.get_running_loop().add_signal_handler(number, ring)


def _leave() -> None:
    for number in _SIGNALS:
        with contextlib.suppress(RuntimeError, ValueError):
            asyncio.get_running_loop().remove_signal_handler(number)
