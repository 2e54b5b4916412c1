"""Turns Ctrl-C and SIGTERM into events that a run can wait for.

The first one ends it in order, a second Ctrl-C at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# `timeout` and batch systems signal the process and then its group: what comes this soon is the same signal once more.
_SAME_S = 0.3
_FIRST = (
    "ending in order: a checkpoint, then summary and timeline; Ctrl-C again leaves at once, without the checkpoint and"
    " the timeline"
)
_SECOND = (
    "leaving at once: a checkpoint that is not written by now is given up, and there is no timeline; the summary is"
    " written"
)


class Interruption(asyncio.Event):
    """An event that is set when the run shall end in order; `at_once` is set when it shall not even do that.

    `tell` gets a line about what that means."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self.at_once = asyncio.Event()
        self._tell = tell
        self._first: float | None = None

    def signalled(self, number: int) -> None:
        """Handle a signal.

        A second Ctrl-C ends the run at once, and a third is handled by Python. SIGTERM comes from machines, which
        follow it with SIGKILL: a repeated SIGTERM changes nothing."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
            self.set()
            self._tell(_FIRST)
        elif number == signal.SIGINT and now - self._first > _SAME_S:
            self.at_once.set()
            self.release_ctrl_c()
            self._tell(_SECOND)

    def release_ctrl_c(self) -> None:
        """Give Ctrl-C back to Python.

        From now on it breaks off what is under way, for example the writing of the timeline. SIGTERM still ends
        nothing: the second one of `timeout` may come late."""
        _remove_handlers(signal.SIGINT)


@contextlib.asynccontextmanager
async def interrupts(tell: Callable[[str], None] = lambda text: None) -> AsyncIterator[Interruption]:
    """Yield the event that SIGINT and SIGTERM set, as long as the context lasts."""
    event = Interruption(tell)
    listen(event)
    try:
        yield event
    finally:
        _remove_handlers(*_SIGNALS)


def listen(event: Interruption) -> None:
    """Install the signal handlers, again after Ray has started: it takes SIGTERM for itself, and dies of it.

    Does nothing once everything is to end at once."""
    if event.at_once.is_set():
        return
    for number in _SIGNALS:
        with contextlib.suppress(RuntimeError, ValueError):  # not in the main thread: it gets no signals
            asyncio.get_running_loop().add_signal_handler(number, event.signalled, number)


def _remove_handlers(*numbers: signal.Signals) -> None:
    for number in numbers:
        with contextlib.suppress(RuntimeError, ValueError):
            asyncio.get_running_loop().remove_signal_handler(number)
