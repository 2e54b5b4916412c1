"""Runs the roles of the table on any runtime: which workers there are, what each of them works, who is told of those
that come and go. A runtime adds how a worker is made, ended and watched."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator
from typing import Any

from omni_async.role_table import RoleSpec, roles_of
from omni_async.runtime.preflight import RunInputs
from omni_async.store import ObjectStore
from omni_async.tracking.rundir import RunDirectory
from omni_async.worker import Worker

Work = Coroutine[Any, Any, Any]


class RoleCluster(ABC):
    """The workers of one attempt, by name."""

    store: ObjectStore
    stores_die: bool

    def __init__(self, inputs: RunInputs, run: RunDirectory) -> None:
        self._inputs = inputs
        self._config = inputs.config
        self._run = run
        self._table = roles_of(inputs.config)
        self._actors: dict[str, Any] = {}

    @property
    def coordinator(self) -> Any:
        return self._actors[str(Worker("coordinator"))]

    @property
    def trainer(self) -> Any:
        return self._actors[str(Worker("trainer"))]

    def spec_of(self, name: str) -> RoleSpec:
        """Returns the row of a worker's role."""
        return self._table[Worker.parse(name).role]

    # ---- what a runtime adds -----------------------------------------------------------------------------------------

    @abstractmethod
    async def _start_late(self, name: str) -> Any:
        """Makes a worker while the run goes on, and returns it when it has started."""

    @abstractmethod
    async def _end(self, name: str) -> None:
        """Ends a worker, if there still is one of that name."""

    @abstractmethod
    async def _run_worker(self, name: str) -> None:
        """Runs a worker until its work is done."""

    # ---- the beginning -----------------------------------------------------------------------------------------------

    def _all_workers(self) -> Iterator[Worker]:
        """Yields the workers that the run begins with, in an order in which each finds those that it needs: the first
        of several that work together has the others."""
        for spec in self._table.values():
            first, *others = spec.workers(self._config) or (None,)
            yield from filter(None, (*others, first) if spec.works == "first" else (first, *others))

    def _peers_of(self, worker: Worker) -> dict[str, Any]:
        """Returns whom a worker calls: the coordinator; the first of several that work together calls every worker
        there is."""
        spec, name = self._table[worker.role], str(Worker("coordinator"))
        if spec.works == "first" and spec.is_at_work(worker):
            return dict(self._actors)
        return {name: self._actors[name]} if name in self._actors else {}

    def _at_work(self) -> Iterator[tuple[str, RoleSpec]]:
        """Yields the workers that have work of their own, with their rows."""
        for name in self._actors:
            if (spec := self.spec_of(name)).is_at_work(Worker.parse(name)):
                yield name, spec

    # ---- running -----------------------------------------------------------------------------------------------------

    def workers(self) -> dict[str, Work]:
        return {name: self._run_worker(name) for name, spec in self._at_work() if spec.on_loss == "replace"}

    def work(self) -> dict[str, Work]:
        return {name: self._run_worker(name) for name, spec in self._at_work() if spec.on_loss == "new attempt"}

    def services(self) -> dict[str, Work]:
        return {
            task: getattr(self._actors[name], method)()
            for name, spec in self._at_work()
            for task, method in spec.services.items()
        }

    async def preempt(self) -> None:
        await self.trainer.preempt()

    # ---- workers that come and go ------------------------------------------------------------------------------------

    async def remove_worker(self, name: str, reason: str) -> None:
        """Ends the worker, and notifies the roles that count on it."""
        await self._end(name)
        await self.spec_of(name).lost(self, name, reason)

    async def start_worker(self, name: str) -> Work:
        """Starts a worker and returns its work. Raises what its start raises."""
        try:
            worker = await self._start_late(name)
            await self.spec_of(name).joins(self, name, worker)
        except BaseException:
            await self._end(name)
            # The roles to notify may be gone too; the first error is what counts, a cancellation above all.
            with contextlib.suppress(Exception):
                await self.spec_of(name).lost(self, name, "it did not join")
            raise
        return self._run_worker(name)

    async def drain_worker(self, name: str) -> None:
        await self._actors[name].leave()
