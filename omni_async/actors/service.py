"""Hosts one worker of a service, a role that another package brings, between the run's protocol and the package's.

Waits for the end of the run (`closing`), or to be told to leave. What the service does meanwhile is its own.
"""

from __future__ import annotations

import asyncio
import contextlib

from omni_async.actors.api import CoordinatorApi
from omni_async.aio.waiting import first_of
from omni_async.services import Service


class ServiceEnded(RuntimeError):
    """Raised when a service ends before the run does."""


# What a service may take to clear itself away: the replacement of a lost one waits for that.
_CLOSING_S = 10.0


class ServiceNotStarted(RuntimeError):
    """Raised when a service does not start, or is none."""


class ServiceHost:
    def __init__(self, name: str, service: Service, coordinator: CoordinatorApi) -> None:
        self.name = name
        self._service = service
        self._coordinator = coordinator
        self._leaving = asyncio.Event()
        self._closed = False

    async def start(self) -> None:
        """Wait until the service is ready, and make its address known."""
        try:
            try:
                address = await self._service.start()
            except Exception as error:
                raise ServiceNotStarted(f"{self.name} did not start: {type(error).__name__}: {error}") from error
            if not isinstance(address, str):
                raise TypeError(f"{self.name}: start() returns its address, a text, got {type(address).__name__}")
            await self._coordinator.service_ready(self.name, address)
        except BaseException:
            await self.close()
            raise

    async def run(self) -> None:
        """Serve until the run is over, or all is done after `leave`. ServiceEnded if the service ends by itself."""
        try:
            await first_of(self._serve(), self._coordinator.closing(), self._drained())
        except Exception:
            with contextlib.suppress(Exception):  # that it failed counts
                await self._coordinator.service_lost(self.name)  # before anything else: nobody should be sent there
            raise
        finally:
            await self.close()

    async def leave(self) -> None:
        """Make the worker finish what it has, and end. Its address is given to nobody any more."""
        await self._coordinator.service_lost(self.name)
        self._leaving.set()

    async def _serve(self) -> None:
        await self._service.run()
        raise ServiceEnded(f"{self.name}: its service ended before the run")

    async def _drained(self) -> None:
        await self._leaving.wait()
        await self._service.drain()

    async def close(self) -> None:
        """Clear the service away, once: after its work, or where it has none because another role did not start."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(Exception):  # how it ended counts, not how it was cleared away
            async with asyncio.timeout(_CLOSING_S):
                await self._service.close()
