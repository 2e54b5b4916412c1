"""What a runtime is to the driver: somewhere the roles live."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol

from omni_async.actors.api import CoordinatorApi
from omni_async.control.events import RunEvent
from omni_async.store import ObjectStore


class PeerLost(RuntimeError):
    """A process of the run is gone or does not answer. Engines and reward workers are replaced; for any other the run
    goes on from its last checkpoint."""


class RunControl(CoordinatorApi, Protocol):
    """The coordinator as the driver sees it."""

    async def events(self) -> list[RunEvent]: ...
    async def stop(self, reason: str) -> None: ...
    async def fail(self, reason: str) -> None: ...
    async def conclude(self) -> None: ...
    async def statistics(self) -> dict[str, Any]: ...


class Cluster(Protocol):
    """`connect` reaches what the roles will live on, `start` brings every role up; `workers` and `work` are what each
    then does until the run is over, by name; `close` frees everything and may be called at any time."""

    store: ObjectStore

    @property
    def coordinator(self) -> RunControl: ...

    async def connect(self) -> None: ...

    async def start(self) -> None: ...

    def workers(self) -> dict[str, Coroutine[Any, Any, Any]]:
        """Engines and reward workers: they end when the coordinator says so, and can be replaced."""

    def work(self) -> dict[str, Coroutine[Any, Any, Any]]:
        """Roles that end when the coordinator says so, and that the run cannot do without."""

    def services(self) -> dict[str, Coroutine[Any, Any, Any]]:
        """Roles that run until they are cancelled."""

    async def remove_worker(self, name: str, reason: str) -> None: ...

    async def start_worker(self, name: str) -> Coroutine[Any, Any, Any]: ...

    async def drain_worker(self, name: str) -> None: ...

    async def preempt(self) -> None:
        """The run was told to stop: no update is worth waiting for."""

    async def find_lost(self) -> str | None:
        """A part that the run cannot do without and that is gone, if there is one."""

    def parts(self) -> dict[str, dict[str, Any]]:
        """Every part at work, and where: `pid`, `node`."""

    async def close(self) -> None: ...
