"""Passes events to the driver and addresses of services to roles; the control plane decides nothing about them.

`events` waits for any event, `addresses` for a ready worker of the service, `closing` for the end of the run, which
unblocks all three.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from omni_async.aio.waiting import Event
from omni_async.config import Config
from omni_async.config.redact import redact_text
from omni_async.types import Prompt, Score, Span
from omni_async.worker import Worker

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

    def add(self, kind: EventKind, data: dict[str, Any], shown: tuple[Shown, ...] = ()) -> None:
        """Queue an event for the driver.

        Args:
            kind, data: as in `RunEvent`.
            shown: samples that the driver shows with it."""
        self._events.append(RunEvent(kind, data, shown))
        self._event.notify()

    async def take(self) -> list[RunEvent]:
        """Return all events since the last call, at least one."""
        while not self._events:
            await self._event.wait()
        events, self._events = self._events, []
        return events


class Bulletin:
    """The calls of a coordinator that need neither samples nor groups."""

    def __init__(self, config: Config) -> None:
        self._roles = [*config.services]
        self._log = EventLog()
        self._addresses: dict[str, str] = {}  # of the workers of services, by name
        self._closed = False  # the run is over or closing
        self._changed = Event()  # set by a change of `_addresses` or `_closed`

    async def events(self) -> list[RunEvent]:
        """Return the events since the last call, at least one."""
        return await self._log.take()

    async def report_spans(self, spans: list[Span]) -> None:
        """Pass spans of time to the driver."""
        self._log.add("spans", {"spans": spans})

    async def phase(self, text: str) -> None:
        """Pass a message for the user to the driver; credentials are masked."""
        self._log.add("phase", {"text": redact_text(text)})

    async def service_ready(self, worker: str, address: str) -> None:
        """Publish the address of a service's ready worker."""
        self._addresses[worker] = address
        self._changed.notify()
        await self.phase(f"{worker}: ready" + (f" at {address}" if address else ""))

    async def service_lost(self, worker: str) -> None:
        """Remove the address of a service's worker that is lost or leaves."""
        self._addresses.pop(worker, None)

    async def addresses(self, role: str) -> dict[str, str]:
        """Wait for a ready worker of a service; return the addresses of all its ready workers, by name.

        Returns an empty dict if the run ends first. Raises ValueError for a role that the recipe does not name, because
        no worker of it would ever be ready."""
        if role not in self._roles:
            raise ValueError(f"addresses: expected a role of the recipe, one of {self._roles}, got {role!r}")
        while True:
            found = {name: address for name, address in self._addresses.items() if Worker.parse(name).role == role}
            if found or self._closed:
                return found
            await self._changed.wait()

    async def closing(self) -> None:
        """Wait until workers get no more work; for workers that wait for something other than work."""
        while not self._closed:
            await self._changed.wait()
