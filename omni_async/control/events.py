"""Passes events to the driver; the control plane decides nothing about them.

`EventLog.take` waits for an event; `EventLog.add` unblocks it. Spans wait for another event, up to a second.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Literal

from msgspec import Struct

from omni_async.aio.waiting import Event
from omni_async.types import Prompt, Score

# Every worker reports spans, often; a call of the driver costs as much for the spans of all.
_SPANS_S = 1.0

EventKind = Literal["phase", "update", "validation", "spans", "lost", "closing", "ended", "concluded"]


class Shown(Struct, frozen=True):
    """A reference to the media of a sample to show, with its prompt and its score."""

    media: Any
    prompt: Prompt
    score: Score


class RunEvent(Struct, frozen=True):
    """An event of the run. `update`, `validation` and `ended` carry plain numbers and strings in `data`."""

    kind: EventKind
    data: dict[str, Any] = {}
    shown: tuple[Shown, ...] = ()


class EventLog:
    """Events on their way to one consumer, the driver."""

    def __init__(self) -> None:
        self._events: list[RunEvent] = []
        self._event = Event()
        self._urgent = False  # whether an event is not spans

    def add(self, kind: EventKind, data: dict[str, Any], shown: tuple[Shown, ...] = ()) -> None:
        """Queue an event for the driver.

        Args:
            kind, data: as in `RunEvent`.
            shown: samples that the driver shows with it."""
        self._events.append(RunEvent(kind, data, shown))
        if kind != "spans":
            self._urgent = True
        if self._urgent or len(self._events) == 1:
            self._event.notify()

    async def take(self) -> list[RunEvent]:
        """Return all events since the last call, at least one."""
        while not self._events:
            await self._event.wait()
        if not self._urgent:
            with suppress(TimeoutError):
                async with asyncio.timeout(_SPANS_S):
                    await self._event.wait()
        events, self._events, self._urgent = self._events, [], False
        return events
