"""Passes on what the control plane decides nothing about: events to the driver, and the addresses of services.

`events` waits for anything that happened, `addresses` for a worker of the service to be ready; the end of the run
unblocks both.
"""

from __future__ import annotations

from omni_async.config import Config
from omni_async.config.redact import redact_text
from omni_async.control.addresses import Addresses
from omni_async.control.events import EventLog, RunEvent
from omni_async.types import Span


class Bulletin:
    """The calls of a coordinator that need neither samples nor groups."""

    def __init__(self, config: Config) -> None:
        self._roles = [one.name for one in config.roles]
        self._log = EventLog()
        self._addresses = Addresses()

    async def events(self) -> list[RunEvent]:
        """Return what happened since the last call, at least one event."""
        return await self._log.take()

    async def report_spans(self, spans: list[Span]) -> None:
        """Pass stretches of time on to the driver."""
        self._log.add("spans", {"spans": spans})

    async def phase(self, text: str) -> None:
        """Pass a message for the user on to the driver."""
        self._log.add("phase", {"text": text})

    async def service_ready(self, worker: str, address: str) -> None:
        """Make known how a service's worker is reached."""
        self._addresses.ready(worker, address)
        await self.phase(f"{worker}: ready" + (f" at {redact_text(address)}" if address else ""))

    async def service_lost(self, worker: str) -> None:
        """Forget the address of a service's worker that is gone, or leaves."""
        self._addresses.lost(worker)

    async def addresses(self, role: str) -> dict[str, str]:
        """Return how the ready workers of a service are reached, by name, once there is one.

        Returns nothing if the run is over before. ValueError for a role that the recipe does not name: nobody would
        ever be ready."""
        if role not in self._roles:
            raise ValueError(f"addresses: expected a role of the recipe, one of {self._roles}, got {role!r}")
        return await self._addresses.of(role)
