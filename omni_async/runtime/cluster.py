"""What a runtime is to the driver: somewhere the roles live."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol

from omni_async.actors.api import CoordinatorApi
from omni_async.control.events import RunEvent
from omni_async.store import ObjectStore


class RunControl(CoordinatorApi, Protocol):
    """The coordinator as the driver sees it."""

    async def events(self) -> list[RunEvent]: ...
    async def stop(self, reason: str) -> None: ...
    async def fail(self, reason: str) -> None: ...
    async def conclude(self) -> None: ...


class Cluster(Protocol):
    """`start` brings every role up; `work` returns what each then does until the run is over, by name; `close` frees everything and may
    be called at any time."""

    store: ObjectStore

    @property
    def coordinator(self) -> RunControl: ...

    async def start(self) -> None: ...

    def work(self) -> dict[str, Coroutine[Any, Any, Any]]:
        """Roles that end when the coordinator says so."""

    def services(self) -> dict[str, Coroutine[Any, Any, Any]]:
        """Roles that run until they are cancelled."""

    async def close(self) -> None: ...
