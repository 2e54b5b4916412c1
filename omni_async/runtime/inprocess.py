"""Runs every role on one event loop: for tests, debugging, and machines without Ray. Classes and messages are the same
as on Ray; nothing is serialised."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from omni_async.actors.service import ServiceHost
from omni_async.aio.clock import Clock
from omni_async.runtime.cluster import StartError
from omni_async.runtime.preflight import RunInputs
from omni_async.runtime.role_cluster import RoleCluster
from omni_async.runtime.sites import Site, build
from omni_async.store import LocalStore, ObjectStore
from omni_async.tracking.rundir import RunDirectory
from omni_async.worker import Worker


class InProcessCluster(RoleCluster):
    """A cluster of roles in this process. `clock`, the wall clock by default, stamps what happens. Emulated devices
    sleep on the event loop's time."""

    stores_die = False  # what a worker stored is in the store that all roles share, and stays

    def __init__(self, inputs: RunInputs, run: RunDirectory, clock: Clock | None = None) -> None:
        super().__init__(inputs, run)
        self.store: ObjectStore = LocalStore()
        self._clock = clock
        for worker in self._all_workers():
            self._build(worker)

    def _build(self, worker: Worker) -> Any:
        peers = self._peers_of(worker)
        site = Site(worker, self._inputs, self._run.path, self.store, peers, clock=self._clock)
        self._actors[str(worker)] = role = build(self._table[worker.role].build, site)
        return role

    async def connect(self) -> None:
        """Does nothing: there is only this process."""

    async def start(self) -> None:
        # One after the other: diffusers and transformers patch torch.nn.Module while they load, for every thread of the
        # process. Reward workers first: a wrong scorer is reported before models load.
        working = sorted(self._at_work(), key=lambda found: found[1].starts_last)
        for name, _ in working:
            await self._ready(name, self._actors[name])

    async def _start_late(self, name: str) -> Any:
        worker = self._build(Worker.parse(name))
        await self._ready(name, worker)
        return worker

    async def _ready(self, name: str, worker: Any) -> None:
        timeout = self._config.run.startup_timeout_s
        try:
            async with asyncio.timeout(timeout) as deadline:
                await worker.start()
        except TimeoutError:
            if not deadline.expired():
                raise  # a timeout within the role
            raise StartError(f"{name}: not ready within run.startup_timeout_s = {timeout:g}") from None

    async def _end(self, name: str) -> None:
        role = self._actors.pop(name, None)
        if isinstance(role, ServiceHost):
            await role.close()

    async def _run_worker(self, name: str) -> None:
        await self._actors[name].run()

    async def find_lost(self) -> str | None:
        return None

    def parts(self) -> dict[str, dict[str, Any]]:
        return {name: {"pid": os.getpid(), "node": "local"} for name in self._actors}

    async def close(self) -> None:
        """Clears services away, whose work may never have begun; other roles free what they hold when theirs ends."""
        for name in [*self._actors]:
            await self._end(name)
