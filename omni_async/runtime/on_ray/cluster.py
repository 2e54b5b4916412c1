"""Runs every role as a long-lived Ray actor.

The run starts a local Ray, or joins the cluster that `run.ray_address` or RAY_ADDRESS names. If this process has
already started a Ray, the run uses it and leaves it running.

Actors are placed as one placement group: the job gets all the resources that it needs, or reports at once which are
missing. The roles' logic is elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor  # noqa: TID251 (`end_process` has a time-out)
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from omni_async.aio.threads import in_daemon_thread
from omni_async.aio.waiting import first_of
from omni_async.config import ConfigError
from omni_async.config.ray_cluster import cluster_address
from omni_async.config.role_table import RoleSpec
from omni_async.plugins.entry_points import load_named
from omni_async.records.write.devices import Device
from omni_async.records.write.logs import capture_output, log_path
from omni_async.records.write.rundir import RunDirectory
from omni_async.roles.builders import WorkerContext
from omni_async.roles.inputs import RunInputs
from omni_async.runtime.cluster import Cluster, PeerLost, StartError
from omni_async.runtime.on_ray.connection import Connection, connect
from omni_async.runtime.on_ray.shell import Proxy, Whereabouts, actor_class, end_process
from omni_async.runtime.on_ray.store import RayStore
from omni_async.runtime.placement import ActorPlacement, PlacementPlan, plan_placements
from omni_async.store import ObjectStore
from omni_async.worker import Worker

_HEALTH_INTERVAL_S = 10.0
# Time for another owner's cluster to learn that this process leaves.
_CLOSING_S = 30.0
# Time for a cancelled start.
_STOPPING_S = 10.0
# Existing resources are assigned at once; the rest of this time is for a cluster that scales up.
_PLACEMENT_TIMEOUT_S = 60.0
# Interval of lines about workers that are still loading.
_LOADING_S = 30.0
# Ray's names of accelerators; `auto` tries them in this order.
KINDS = ("GPU", "NPU")


def _load() -> str:
    """Return the load of this machine if its cores cannot serve it, as a reason why something takes long."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f" (load {load:.0f} on {cores} cores)" if load > 2 * cores else ""


class RayCluster(Cluster):
    """A cluster of Ray actors. `attempt`: number of this attempt in this process, from 1."""

    stores_die = True

    def __init__(self, inputs: RunInputs, run: RunDirectory, attempt: int = 1) -> None:
        super().__init__(inputs, run)
        self._attempt = attempt
        self.store: ObjectStore = _DriverStore()
        self._handles: dict[str, Any] = {}
        self._where: dict[str, Whereabouts] = {}
        self._devices: dict[str, list[Device]] = {}
        self._group: PlacementGroup | None = None
        self._placements: PlacementPlan = plan_placements(inputs.config)
        self._kind = KINDS[0]
        self._connection: Connection | None = None

    @property
    def _has_own_ray(self) -> bool:
        """Return whether Ray was started for this run, on this machine."""
        return self._connection is not None and self._connection.started and self._connection.local is not None

    # ---- coming up ---------------------------------------------------------------------------------------------------

    async def connect(self) -> None:
        run, stop = self._config.run, threading.Event()
        store_bytes = self._config.placement.store_bytes
        join = partial(connect, cluster_address(run), self._placements.cpus, run.startup_timeout_s, stop, store_bytes)
        starting = asyncio.ensure_future(in_daemon_thread(join))
        try:
            self._connection = await asyncio.shield(starting)
        except asyncio.CancelledError:
            stop.set()
            self.tell(f"waiting until Ray has given up its start, for up to {_STOPPING_S:g} s")
            await asyncio.wait([starting], timeout=_STOPPING_S)
            if starting.done() and starting.exception() is None:
                self._connection = starting.result()
            raise

    async def start(self) -> None:
        """Start the actors concurrently, then load their models. Raises PeerLost if Ray is lost meanwhile."""
        await first_of(self._start(), self._watch_ray())

    async def _start(self) -> None:
        await self._reserve()
        await in_daemon_thread(lambda: [self._spawn(worker) for worker in self._all_workers()])
        loading = {name for name, _ in self._at_work()}

        async def start(name: str) -> None:
            await self._actors[name].start()
            self.starts[name] = await self._handles[name].stages.remote(True)
            loading.discard(name)

        async with self._startup_limit(lambda: ", ".join(sorted(loading)) or "the actors"):
            reporting = asyncio.create_task(self._report(loading))
            try:
                await asyncio.gather(*map(start, [*loading]))
            finally:
                reporting.cancel()
            await asyncio.gather(*(self._locate(name) for name in self._actors))
            waiting = [name for name in self._actors if name not in self.starts]
            self.starts |= {name: await self._handles[name].stages.remote(False) for name in waiting}

    async def _report(self, loading: Collection[str]) -> None:
        """Show the workers that are not ready, repeatedly: large models load for minutes."""
        while True:
            await asyncio.sleep(_LOADING_S)
            self.tell(f"still loading: {', '.join(sorted(loading))}{_load()}")

    async def _reserve(self) -> None:
        """Request the job's placement group, and wait until its resources are reserved.

        Raises:
            ConfigError: there is no accelerator of this kind. If Ray can grow, this is raised only if it has another
                kind, or
                after a minute.
            StartError: all machines together are too small, and Ray does not grow. Or other resources were missing for
                a
                minute: the machines are too small, or other jobs use them."""
        plan = self._placements
        kind = self._kind = await in_daemon_thread(partial(_accelerator_kind, self._config.placement.accelerator))
        if not plan.bundles:
            return
        wanted = [{"CPU": one.cpus, **({kind: one.gpus} if one.gpus else {})} for one in plan.bundles]
        if self._has_own_ray:  # it does not grow
            await in_daemon_thread(partial(_require_room, wanted, kind))
        elif plan.gpus:
            await in_daemon_thread(partial(_require_kind, plan.gpus, kind))
        group: PlacementGroup = await in_daemon_thread(partial(placement_group, wanted, strategy=plan.strategy))
        self._group = group
        if not self._has_own_ray:
            asked = f"{plan.cpus:g} CPUs" + (f" and {plan.gpus:g} {kind}s" if plan.gpus else "")
            self.tell(f"reserving {asked} of the cluster (up to {_PLACEMENT_TIMEOUT_S:g} s)")
        try:
            async with asyncio.timeout(_PLACEMENT_TIMEOUT_S):
                await group.ready()
        except TimeoutError:
            await in_daemon_thread(partial(_require_room, wanted, kind))
            raise StartError(
                f"placement: there is no room for the run{' on one machine' * (plan.strategy == 'STRICT_PACK')}:"
                f" {await in_daemon_thread(_what_is_free)}; wait for other jobs, or lower placement.*"
            ) from None

    def _spawn(self, worker: Worker) -> Proxy:
        build, peers = self._table[worker.role].build, self._peers_of(worker)
        is_local = self._connection is not None and self._connection.local is not None
        host = "127.0.0.1" if is_local else None  # all roles are on this machine
        return self._host(worker, partial(_build_there, build, worker, self._inputs, self._run.path, peers, host))

    def _host(self, worker: Worker, make: Callable[[], Any]) -> Proxy:
        """Start an actor with the worker's placement, around the role that `make` returns there."""
        name, spec = str(worker), self._table[worker.role]
        placement = self._placements.actors.get(worker.slot) or self._placement_beside(spec)
        options: dict[str, Any] = {"num_cpus": placement.cpus, "num_gpus": placement.gpus if self._kind == "GPU" else 0}
        if self._kind != "GPU" and placement.gpus:
            options["resources"] = {self._kind: placement.gpus}
        if placement.bundle is not None:
            assert self._group is not None, "actors are placed after the group was reserved"
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=placement.bundle
            )
        full_name = f"{self._run.run_id}/{self._attempt}/{name}"
        self._handles[name] = actor_class().options(name=full_name, **options).remote(make, placement.threads)
        self._actors[name] = Proxy(name, self._handles[name], spec.waiting_calls)
        return self._actors[name]

    def _is_emulated(self, spec: RoleSpec) -> bool:
        return spec.emulated and self._config.emulation is not None

    def _placement_beside(self, spec: RoleSpec) -> ActorPlacement:
        """Return the placement of a worker that is added during the job.

        A Ray that was started for this run counts the CPUs requested at the run's start, not the machine's CPUs, so an
        added worker shares them."""
        resources, emulated = spec.resources(self._config), self._is_emulated(spec)
        cpus = 0.0 if emulated or self._has_own_ray else resources.cpus
        return ActorPlacement(None, cpus, 0.0 if emulated else resources.gpus, max(1, int(resources.cpus)))

    async def _locate(self, name: str) -> None:
        self._where[name] = await self._handles[name].whereabouts.remote()

    # ---- running -----------------------------------------------------------------------------------------------------

    def services(self) -> dict[str, Any]:
        """Return the tasks that run until they are cancelled, including health checks of answering roles and of Ray."""
        working = {name for name, _ in self._at_work()}
        health = {f"health of {name}": self._watch(name) for name in self._actors if name not in working}
        return {"Ray": self._watch_ray(), **super().services(), **health}

    async def _watch_ray(self) -> None:
        """Raise PeerLost when Ray is lost."""
        if self._connection is None:
            await asyncio.Event().wait()  # another cluster object made the connection
            return
        raise PeerLost(f"Ray is gone: {await self._connection.lost(self._config.run.health_timeout_s)}")

    async def _run_worker(self, name: str) -> None:
        """Run a worker until its work is done. Raises PeerLost if it dies or hangs."""
        await first_of(self._actors[name].run(), self._watch(name))

    async def _watch(self, name: str) -> None:
        deadline = self._config.run.health_timeout_s
        while True:
            await asyncio.sleep(min(_HEALTH_INTERVAL_S, deadline / 4))
            await self._check(name)

    async def _check(self, name: str) -> None:
        """Raise PeerLost unless the actor answers in time."""
        deadline = self._config.run.health_timeout_s
        try:
            async with asyncio.timeout(deadline):
                self._devices[name] = await self._handles[name].ping.remote()
        except TimeoutError:
            raise PeerLost(f"{name} has not answered for {deadline:g} s") from None
        except (ray.exceptions.RayError, KeyError):
            raise PeerLost(f"{name} is gone") from None

    async def find_lost(self) -> str | None:
        found: str | None = None
        try:
            async with asyncio.TaskGroup() as checks:  # the first loss found cancels the other checks
                for name in self._actors:
                    if self.spec_of(name).on_loss == "new attempt":
                        checks.create_task(self._check(name))
        except* PeerLost as lost:
            found = str(lost.exceptions[0])
        return found

    def parts(self) -> dict[str, dict[str, Any]]:
        where = ((name, self._where[name]) for name in self._actors if name in self._where)
        return {name: {"pid": one.pid, "node": one.node} for name, one in where}

    def sampled(self) -> list[tuple[str, str, list[Device]]]:
        where = self._where
        return [(name, where[name].node, found) for name, found in self._devices.items() if found and name in where]

    # ---- workers that join and leave ---------------------------------------------------------------------------------

    async def _start_late(self, name: str) -> Proxy:
        """Start a worker. Raises StartError if it is not ready in time, for example for lack of resources."""
        timeout = self._config.run.startup_timeout_s
        worker = await in_daemon_thread(partial(self._spawn, Worker.parse(name)))
        try:
            async with asyncio.timeout(timeout) as deadline:
                await worker.start()
                await self._locate(name)
        except TimeoutError:
            if not deadline.expired():
                raise
            late = f"{name} was not ready within run.startup_timeout_s = {timeout:g}"
            raise StartError(f"{late}: {await in_daemon_thread(_what_is_free)}") from None
        return worker

    async def _end(self, name: str) -> None:
        """End the worker's process, and thereby remove its stored objects."""
        handle, where = self._handles.pop(name, None), self._where.pop(name, None)
        self._actors.pop(name, None)
        if where is not None:
            await in_daemon_thread(end_process, where)
        if handle is not None:
            ray.kill(handle)

    async def close(self) -> None:
        """Free the run's actors and placement group, and end the Ray that was started for the run."""
        connection, self._connection = self._connection, None
        if connection is None or not (connection.is_lost or (connection.started and connection.local)):
            with contextlib.suppress(TimeoutError):  # no answer: the cluster's owner will detect that
                async with asyncio.timeout(_CLOSING_S):
                    await in_daemon_thread(self._free)
        if connection is not None:
            await in_daemon_thread(connection.close)

    def _free(self) -> None:
        # Run each step even if an earlier one fails: Ray may be broken.
        with contextlib.ExitStack() as then:
            group, self._group = self._group, None
            if group is not None:
                then.callback(remove_placement_group, group)
            self._end_all()

    def _end_all(self) -> None:
        handles, self._handles = self._handles, {}
        where, self._where = self._where, {}
        self._actors = {}
        for handle in handles.values():
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(handle)
        if where and ray.is_initialized():
            here = ray.get_runtime_context().get_node_id()
            # Ray has ended the workers on other nodes. A surviving trainer or coordinator would write to the same
            # places as the next attempt.
            lasting = {name for name in where if self.spec_of(name).on_loss == "new attempt"}
            ending = [one for name, one in where.items() if one.node == here or name in lasting]
            with ThreadPoolExecutor(max(1, len(ending))) as threads:
                list(threads.map(end_process, ending))


class _DriverStore(RayStore):
    """A store that copies every value it reads: returning Ray's memory to a lost Ray kills the process at once."""

    async def get(self, reference: Any) -> Any:
        return copy.deepcopy(await super().get(reference))


def _build_there(
    path: str, worker: Worker, inputs: RunInputs, folder: Path, peers: dict[str, Any], host: str | None
) -> Any:
    """Build a role in its actor's process. `host`: the address to listen at; None: its machine's address."""
    host = host or ray.util.get_node_ip_address()
    capture_output(log_path(RunDirectory(folder).logs, str(worker)))
    return load_named(path)(WorkerContext(worker, inputs, folder, RayStore(), peers, host, own_process=True))


# ---- accelerators by their kind, and one placement group for the whole job -------------------------------------------


def _accelerator_kind(asked: str) -> str:
    """Return Ray's name of the accelerators requested by `placement.accelerator`."""
    if asked != "auto":
        return asked
    have = ray.cluster_resources()
    return next((kind for kind in KINDS if have.get(kind)), KINDS[0])


def _require_kind(asked: float, kind: str) -> None:
    """Raise ConfigError if the cluster has accelerators, but none of this kind.

    A cluster without any may be about to get some."""
    have = ray.cluster_resources()
    if not have.get(kind) and any(have.get(other) for other in KINDS):
        raise _lacks(asked, kind, have)


def _lacks(asked: float, kind: str, have: dict[str, float]) -> ConfigError:
    others = " and ".join(f"{have[other]:g} {other}s" for other in KINDS if have.get(other)) or "no accelerators"
    return ConfigError(
        f"placement.accelerator: the run asks for {asked:g} {kind}s, and the Ray cluster has {others}; set it to what"
        " the cluster has, or lower placement.*.gpus (0 is the CPU)"
    )


def _require_room(wanted: Sequence[dict[str, float]], kind: str) -> None:
    """Raise StartError if all machines together, were they free, are too small.

    Raises ConfigError if they have no accelerator of this kind."""
    have = ray.cluster_resources()
    need = {name: sum(bundle.get(name, 0) for bundle in wanted) for name in ("CPU", kind)}
    if need[kind] and not have.get(kind):
        raise _lacks(need[kind], kind, have)
    if any(need[name] > have.get(name, 0) for name in need):
        there = f"{have.get('CPU', 0):g} and {have.get(kind, 0):g} in all"
        raise StartError(
            f"placement: the run needs {need['CPU']:g} CPUs and {need[kind]:g} {kind}s, the cluster has {there};"
            " lower placement.* or the numbers of workers"
        )


def _what_is_free() -> str:
    have, free = ray.cluster_resources(), ray.available_resources()
    return ", ".join(
        f"{free.get(kind, 0):g} of {have.get(kind, 0):g} {kind}s are free" for kind in ("CPU", *KINDS) if kind in have
    )
