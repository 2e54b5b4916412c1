"""What the run tells whoever watches it (the driver: console, MLflow, files). One consumer, long-polling."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from omni_async.control.waiting import Bell

EventKind = Literal["phase", "update", "validation", "spans", "ended"]


class RunEvent(Struct, frozen=True):
    """`update`, `validation` and `ended` carry plain numbers and strings in `data`, and media references in `media`."""

    kind: EventKind
    data: dict[str, Any] = {}
    media: tuple[tuple[Any, str], ...] = ()


class EventLog:
    def __init__(self) -> None:
        self._events: list[RunEvent] = []
        self._bell = Bell()

    def add(self, kind: EventKind, data: dict[str, Any], media: tuple[tuple[Any, str], ...] = ()) -> None:
        self._events.append(RunEvent(kind, data, media))
        self._bell.ring()

    async def take(self) -> list[RunEvent]:
        """All events since the last call, at least one."""
        while not self._events:
            await self._bell.wait()
        events, self._events = self._events, []
        return events
