"""Runs the roles of the role table: lists workers, connects them with their peers, and reports joins and losses.

The driver uses a `Cluster`; each runtime implements how workers are started, ended and watched.
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Protocol

from omni_async.aio.waiting import Stopped
from omni_async.config import ConfigError
from omni_async.config.redact import redact_text
from omni_async.config.role_table import Membership, RoleSpec, roles_of
from omni_async.control.events import RunEvent
from omni_async.records.write.devices import Device
from omni_async.records.write.rundir import RunDirectory
from omni_async.rewards.base import WrongScorer
from omni_async.roles.inputs import RunInputs
from omni_async.runtime.start_times import Stage
from omni_async.store import ObjectStore
from omni_async.worker import COORDINATOR, TRAINER, Worker

Work = Coroutine[Any, Any, Any]


class PeerLost(RuntimeError):
    """Raised when a process of the run is gone or does not answer.

    `on_loss` in its role's row of the table decides: replace the worker, or restart from the last checkpoint."""


class StartError(RuntimeError):
    """Raised when the cluster could not be started; the message contains a remedy."""


# Ends of work that a run expects, or that their one line explains.
_ORDERLY = (asyncio.CancelledError, ConfigError, PeerLost, StartError, Stopped, WrongScorer)
_SHOWN, _HERE = "_omni_async_shown", object()  # an exception that another process has sent has another object


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an unexpected exception and of its causes, without credentials, for a worker's log.

    It is empty for an orderly end, and from the second call on: several callers may wait for the same exception."""
    found: BaseException | None = None if isinstance(error, _ORDERLY) else error
    if isinstance(error, BaseExceptionGroup):
        found = error.split(_ORDERLY)[1]
    if found is None or error.__dict__.get(_SHOWN) is _HERE:
        return ""
    error.__dict__[_SHOWN] = _HERE  # exceptions of other packages may refuse setattr
    return redact_text("".join(traceback.format_exception(found)))


class RunControl(Membership, Protocol):
    """The coordinator as the driver sees it."""

    async def events(self) -> list[RunEvent]: ...
    async def stop(self, reason: str) -> None: ...
    async def fail(self, reason: str) -> None: ...
    async def conclude(self) -> None: ...
    async def statistics(self) -> dict[str, Any]: ...


class Cluster(ABC):
    """The workers of one attempt of a run, by name. `close` frees everything and may be called at any time.

    `starts`: the stages of the initial workers' starts, by name, for workers with their own process. Workers that load
    something come first, in the order of their readiness.
    `tell` receives console lines about waits; the driver sets it."""

    store: ObjectStore
    stores_die: bool
    tell: Callable[[str], None]

    def __init__(self, inputs: RunInputs, run: RunDirectory) -> None:
        self._inputs = inputs
        self._config = inputs.config
        self._run = run
        self._table = roles_of(inputs.config)
        self._actors: dict[str, Any] = {}
        self.starts: dict[str, list[Stage]] = {}
        self.tell = lambda text: None

    @property
    def coordinator(self) -> RunControl:
        return self._actors[COORDINATOR]

    @property
    def trainer(self) -> Any:
        return self._actors[TRAINER]

    def spec_of(self, name: str) -> RoleSpec:
        """Return the row of a worker's role."""
        return self._table[Worker.parse(name).role]

    # ---- what a runtime adds -----------------------------------------------------------------------------------------

    @abstractmethod
    async def connect(self) -> None:
        """Reach the machines that the roles run on."""

    @abstractmethod
    async def start(self) -> None:
        """Start every role."""

    @abstractmethod
    async def _start_late(self, name: str) -> Any:
        """Start a worker during the run, and return it when it has started."""

    @abstractmethod
    async def _end(self, name: str) -> None:
        """End a worker; do nothing if no worker has that name."""

    @abstractmethod
    async def _run_worker(self, name: str) -> None:
        """Run a worker until its work is done."""

    @abstractmethod
    async def find_lost(self) -> str | None:
        """Return a description of a lost part that the run cannot do without, or None if no such part is lost."""

    @abstractmethod
    def parts(self) -> dict[str, dict[str, Any]]:
        """Return the `pid` and `node` of every part at work, by name."""

    def roles(self) -> dict[int, str]:
        """Return the role of every worker with its own process on this machine, by pid; for any thread."""
        return {}

    @abstractmethod
    def sampled(self) -> list[tuple[str, str, list[Device]]]:
        """Return each worker that uses accelerators, its node, and the accelerators that it sees, as last read."""

    @abstractmethod
    async def close(self) -> None: ...

    # ---- the beginning -----------------------------------------------------------------------------------------------

    def _all_workers(self) -> Iterator[Worker]:
        """Yield the initial workers, each after the workers that it needs.

        If a role works through its first worker, the first one comes last, because it calls the others."""
        for spec in self._table.values():
            first, *others = spec.workers(self._config) or (None,)
            yield from filter(None, (*others, first) if spec.works == "first" else (first, *others))

    def _peers_of(self, worker: Worker) -> dict[str, Any]:
        """Return the actors that a worker calls: the coordinator, or every actor.

        The first worker of a role that works through its first worker calls every existing worker."""
        spec = self._table[worker.role]
        everybody = spec.works == "first" and spec.is_at_work(worker)
        return {name: actor for name, actor in self._actors.items() if everybody or name == COORDINATOR}

    def _at_work(self) -> Iterator[tuple[str, RoleSpec]]:
        """Yield the workers that have their own work, with their rows of the table."""
        for name in self._actors:
            if (spec := self.spec_of(name)).is_at_work(Worker.parse(name)):
                yield name, spec

    @contextlib.asynccontextmanager
    async def _startup_limit(self, late: Callable[[], str]) -> AsyncIterator[None]:
        """Raise StartError, naming `late()`, if a start takes longer than run.startup_timeout_s."""
        timeout = self._config.run.startup_timeout_s
        try:
            async with asyncio.timeout(timeout) as deadline:
                yield
        except TimeoutError:
            if not deadline.expired():
                raise  # a timeout within a role
            raise StartError(f"{late()}: not ready within run.startup_timeout_s = {timeout:g}") from None

    # ---- running -----------------------------------------------------------------------------------------------------

    def workers(self) -> dict[str, Work]:
        """Return the work of replaceable workers, which end when the coordinator ends the run."""
        return {name: self._run_worker(name) for name, spec in self._at_work() if spec.on_loss == "replace"}

    def work(self) -> dict[str, Work]:
        """Return the work of roles that the run cannot do without, which end when the coordinator ends the run."""
        return {name: self._run_worker(name) for name, spec in self._at_work() if spec.on_loss == "new attempt"}

    def services(self) -> dict[str, Work]:
        """Return the work of roles that run until they are cancelled."""
        return {
            task: self._run_service(name, method)
            for name, spec in self._at_work()
            for task, method in spec.services.items()
        }

    async def _run_service(self, name: str, method: str) -> None:
        await getattr(self._actors[name], method)()

    async def preempt(self) -> None:
        """Notify the trainer that the run stops, so no update is worth waiting for."""
        await self.trainer.preempt()

    # ---- workers that join and leave ---------------------------------------------------------------------------------

    async def remove_worker(self, name: str, reason: str) -> None:
        """End the worker, and notify the roles that depend on it."""
        await self._end(name)
        await self._tell_lost(name, reason)

    async def _tell_lost(self, name: str, reason: str) -> None:
        if (tell := self.spec_of(name).lost) is not None:
            await tell(self, name, reason)

    async def start_worker(self, name: str) -> Work:
        """Start a worker and return its work. Raises the exception of a failed start."""
        try:
            worker = await self._start_late(name)
            if (tell := self.spec_of(name).joins) is not None:
                await tell(self, name, worker)
        except BaseException:
            await self._end(name)
            # The roles to notify may be gone too; the first error matters, a cancellation above all.
            with contextlib.suppress(Exception):
                await self._tell_lost(name, "it did not join")
            raise
        return self._run_worker(name)

    async def drain_worker(self, name: str) -> None:
        """Make the worker finish its current work, and end. A lost worker has nothing to finish."""
        with contextlib.suppress(PeerLost):  # it may end, and be removed, before its answer arrives
            await self._actors[name].leave()
