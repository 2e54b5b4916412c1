"""Runs every role on one event loop: for tests, debugging, and machines without Ray.

Classes and messages are the same as on Ray; nothing is serialised. A worker's output is copied to its log; output of a
call by another worker is in the caller's log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from omni_async.aio.clock import Clock, WallClock
from omni_async.control.events import RunEvent
from omni_async.plugins.entry_points import load_named
from omni_async.records.write.devices import Device, DeviceSampler
from omni_async.records.write.logs import SharedOutput, printing_as
from omni_async.records.write.rundir import RunDirectory
from omni_async.roles.builders import ServiceHost, WorkerContext
from omni_async.roles.inputs import RunInputs
from omni_async.runtime.cluster import Cluster, traceback_of
from omni_async.store import LocalStore, ObjectStore
from omni_async.worker import Worker


class InProcessCluster(Cluster):
    """A cluster of roles in this process.

    `clock`, by default the wall clock, stamps events. Emulated devices sleep on the event loop's time."""

    stores_die = False  # all roles share one store, which keeps the objects of a lost worker

    def __init__(self, inputs: RunInputs, run: RunDirectory, clock: Clock | None = None) -> None:
        super().__init__(inputs, run)
        self.store: ObjectStore = LocalStore()
        self._clock = clock or WallClock()
        self._output, self._devices = SharedOutput(run.logs), DeviceSampler()
        for worker in self._all_workers():
            self._build(worker)

    @contextlib.contextmanager
    def _logging(self, worker: str) -> Iterator[None]:
        """Attribute output to a worker; add the traceback of an exception to its log."""
        with printing_as(worker):
            try:
                yield
            except Exception as error:
                self._output.add(worker, traceback_of(error))
                raise

    def _build(self, worker: Worker) -> Any:
        context = WorkerContext(
            worker, self._inputs, self._run.path, self.store, self._peers_of(worker), clock=self._clock
        )
        with self._logging(str(worker)):
            self._actors[str(worker)] = role = load_named(self._table[worker.role].build)(context)
        return role

    async def connect(self) -> None:
        """Begin to copy output to logs, and to read an accelerator; all roles run in this process."""
        self._output.open()
        asking = (spec.resources(self._config).gpus for spec in self._table.values())
        if self._config.emulation is None and any(asking):
            self._devices.start()

    async def start(self) -> None:
        # One after the other: diffusers and transformers patch torch.nn.Module while they load, for every thread of the
        # process. Reward workers first: a wrong scorer is reported before models load.
        working = sorted(self._at_work(), key=lambda found: found[1].starts_last)
        for name, spec in working:
            if self._inputs.profile is None:  # emulated devices load nothing
                self.tell(f"{name}: {spec.loading}")
            await self._ready(name, self._actors[name])

    async def _start_late(self, name: str) -> Any:
        worker = self._build(Worker.parse(name))
        await self._ready(name, worker)
        return worker

    async def _ready(self, name: str, worker: Any) -> None:
        async with self._startup_limit(lambda: name):
            with self._logging(name):
                await worker.start()

    async def _end(self, name: str) -> None:
        role = self._actors.pop(name, None)
        if isinstance(role, ServiceHost):
            await role.close()

    async def _run_worker(self, name: str) -> None:
        with self._logging(name):
            await self._actors[name].run()

    async def _run_service(self, name: str, method: str) -> None:
        with self._logging(name):
            await super()._run_service(name, method)

    async def find_lost(self) -> str | None:
        return None

    def parts(self) -> dict[str, dict[str, Any]]:
        return {name: {"pid": os.getpid(), "node": "local"} for name in self._actors}

    def sampled(self) -> list[tuple[str, str, list[Device]]]:
        return [("all workers", "local", self._devices.devices)]

    async def close(self) -> None:
        """Close services, whose work may never have begun. Other roles free their resources when their work ends."""
        try:
            for name in [*self._actors]:
                await self._end(name)
        finally:
            self._devices.stop()
            self._output.close()


async def events_of(inputs: RunInputs, run: RunDirectory, clock: Callable[[], Clock]) -> list[RunEvent]:
    """Run a job to its end without a driver, and return everything that happened.

    Recoverable faults are not handled: the first exception of a role is raised. `clock` is called in the event loop,
    which a clock of virtual time belongs to."""
    cluster = InProcessCluster(inputs, run, clock())
    events: list[RunEvent] = []

    async def watch() -> None:
        while not any(event.kind == "ended" for event in events):
            events.extend(await cluster.coordinator.events())

    await cluster.start()
    services = [asyncio.create_task(work) for work in cluster.services().values()]
    await asyncio.gather(watch(), *cluster.work().values(), *cluster.workers().values())
    for service in services:
        service.cancel()
    await asyncio.gather(*services, return_exceptions=True)
    await cluster.coordinator.conclude()  # its event, at least, can be taken
    events.extend(await cluster.coordinator.events())
    return events
