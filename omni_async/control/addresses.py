"""Knows by which addresses the workers of services are reached.

`of` waits until a worker of the role is ready; unblocked by its start, or by the end of the run.
"""

from __future__ import annotations

from omni_async.aio.waiting import Event
from omni_async.worker import Worker


class Addresses:
    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        self._changed = Event()
        self._closed = False

    def ready(self, name: str, address: str) -> None:
        self.known[name] = address
        self._changed.notify()

    def lost(self, name: str) -> None:
        """Forget a worker that is gone, or leaves."""
        self.known.pop(name, None)

    def close(self) -> None:
        """End all waits, because the run is over."""
        self._closed = True
        self._changed.notify()

    async def of(self, role: str) -> dict[str, str]:
        """Return the addresses of the role's workers by name; none once the run is over and none is ready."""
        while True:
            found = {name: address for name, address in self.known.items() if Worker.parse(name).role == role}
            if found or self._closed:
                return found
            await self._changed.wait()
