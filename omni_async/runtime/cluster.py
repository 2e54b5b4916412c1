"""Defines what a runtime offers the driver: a cluster on which the roles run."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol

from omni_async.actors.api import CoordinatorApi
from omni_async.control.events import RunEvent
from omni_async.store import ObjectStore


class PeerLost(RuntimeError):
    """Raised when a process of the run is gone or does not answer. Its role's row in the table says whether it is
    replaced, or the run goes on from its last checkpoint."""


class StartError(RuntimeError):
    """Raised when the cluster could not be started; the text says what to do."""


class RunControl(CoordinatorApi, Protocol):
    """The coordinator as the driver sees it."""

    async def events(self) -> list[RunEvent]: ...
    async def stop(self, reason: str) -> None: ...
    async def fail(self, reason: str) -> None: ...
    async def conclude(self) -> None: ...
    async def statistics(self) -> dict[str, Any]: ...


class Cluster(Protocol):
    """The processes of one attempt of a run. `connect` reaches the machines that the roles run on, `start` starts every
    role; `workers`, `work` and `services` give each role's work until the run is over, by name; `close` frees
    everything and may be called at any time."""

    store: ObjectStore

    @property
    def coordinator(self) -> RunControl: ...

    async def connect(self) -> None: ...

    async def start(self) -> None: ...

    def workers(self) -> dict[str, Coroutine[Any, Any, Any]]:
        """Returns the work of workers that end when the coordinator says so and can be replaced: engines, reward
        workers, services."""

    def work(self) -> dict[str, Coroutine[Any, Any, Any]]:
        """Returns the work of roles that end when the coordinator says so and that the run cannot do without."""

    def services(self) -> dict[str, Coroutine[Any, Any, Any]]:
        """Returns the work of roles that run until they are cancelled."""

    async def remove_worker(self, name: str, reason: str) -> None: ...

    async def start_worker(self, name: str) -> Coroutine[Any, Any, Any]: ...

    async def drain_worker(self, name: str) -> None: ...

    async def preempt(self) -> None:
        """Tells the trainer that the run is to stop: no update is worth waiting for."""

    async def find_lost(self) -> str | None:
        """Returns what became of a part that the run cannot do without and that is gone, or None if there is none."""

    def parts(self) -> dict[str, dict[str, Any]]:
        """Returns the `pid` and `node` of every part at work, by name."""

    async def close(self) -> None: ...
