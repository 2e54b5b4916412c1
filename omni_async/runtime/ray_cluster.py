"""Runs every role as a long-lived Ray actor. A local Ray starts by itself; `run.ray_address` joins a cluster instead; a
Ray that this process has started already is used as it is, and left running.

Actors are placed as one placement group: the job gets all it needs or reports at once what is missing. The roles' logic
is elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from omni_async.config.schema import Resources
from omni_async.control.waiting import first_of
from omni_async.runtime import roles
from omni_async.runtime.cluster import PeerLost
from omni_async.runtime.keeper import place_of
from omni_async.runtime.placement import ActorPlacement, PlacementPlan, plan_placements, role_names
from omni_async.runtime.preflight import RunInputs
from omni_async.runtime.ray_connection import Connection, StartError, connect, in_thread
from omni_async.runtime.ray_processes import Whereabouts, end_process
from omni_async.runtime.ray_shell import Proxy, RayStore, actor_class
from omni_async.store import ObjectStore
from omni_async.tracking.rundir import RunDirectory

_HEALTH_INTERVAL_S = 10.0
# Resources that exist are handed out at once; the rest is for a cluster that scales up.
_PLACEMENT_TIMEOUT_S = 60.0
# For another owner's cluster to learn that this process leaves.
_CLOSING_S = 30.0
# For a start that is cancelled.
_STOPPING_S = 10.0

T = TypeVar("T")


class RayCluster:
    """A cluster of Ray actors. `attempt` counts how often the run was begun in this process, from 1."""

    def __init__(self, inputs: RunInputs, run: RunDirectory, attempt: int = 1) -> None:
        self._inputs = inputs
        self._run = run
        self._attempt = attempt
        self.store: ObjectStore = _DriverStore()
        self._actors: dict[str, Any] = {}
        self._where: dict[str, Whereabouts] = {}
        self._group: PlacementGroup | None = None
        self._placements: PlacementPlan = plan_placements(inputs.config, role_names(inputs.config))
        self._connection: Connection | None = None

    @property
    def _has_own_ray(self) -> bool:
        """Returns whether Ray was started for this run, on this machine."""
        return self._connection is not None and self._connection.started and self._connection.local is not None

    @property
    def coordinator(self) -> Any:
        return self._proxy("coordinator")

    # ---- coming up ---------------------------------------------------------------------------------------------------

    async def connect(self) -> None:
        run, stop = self._inputs.config.run, threading.Event()
        starting = asyncio.ensure_future(
            in_thread(partial(connect, run.ray_address, self._placements.cpus, run.startup_timeout_s, stop)),
        )
        try:
            self._connection = await asyncio.shield(starting)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait([starting], timeout=_STOPPING_S)
            if starting.done() and starting.exception() is None:
                self._connection = starting.result()
            raise

    async def start(self) -> None:
        """Starts the actors side by side, then loads their models. Raises PeerLost if Ray is lost meanwhile."""
        await first_of(self._start(), self._watch_ray())

    async def _start(self) -> None:
        await self._reserve(self._placements.bundles)
        timeout = self._inputs.config.run.startup_timeout_s
        roles_to_start = await in_thread(self._spawn_all)
        starting = asyncio.gather(*(role.start() for role in roles_to_start))
        try:
            async with asyncio.timeout(timeout) as deadline:
                await starting
                await asyncio.gather(*(self._locate(name) for name in self._actors))
        except TimeoutError:
            if not deadline.expired():
                raise  # a timeout within a role
            raise StartError(f"the actors were not ready within run.startup_timeout_s = {timeout}") from None

    def _spawn_all(self) -> list[Any]:
        """Creates all actors and returns those on which `start` is to be called."""
        config = self._inputs.config
        self._spawn("coordinator", partial(_coordinator, self._inputs, self._run.run_id, str(self._run.ledger)))
        offline = config.data.preferences is not None
        readers = [self._spawn_reader(name) for name in config.engine_names] if offline else []
        producers = {} if offline else {name: self._spawn_producer(name) for name in config.engine_names}
        names = role_names(config)
        rewarders = [self._spawn_rewarder(name) for name in names["reward"]]
        others = [
            self._spawn(name, partial(_rank, rank, self._inputs))
            for rank, name in enumerate(names["trainer"])
            if rank > 0
        ]
        folders = str(self._run.checkpoints), str(self._run.weights)
        trainer = self._spawn("trainer", partial(_trainer, self._inputs, others, producers, self.coordinator, *folders))
        return [trainer, *readers, *producers.values(), *rewarders]

    async def _reserve(self, bundles: Sequence[Resources]) -> None:
        if not bundles:
            return
        wanted = [{"CPU": r.cpus, **({"GPU": r.gpus} if r.gpus else {})} for r in bundles]
        if self._has_own_ray:
            await in_thread(partial(_require_room, wanted))  # its resources do not grow
        group: PlacementGroup = await in_thread(partial(placement_group, wanted, strategy="PACK"))
        self._group = group
        try:
            async with asyncio.timeout(_PLACEMENT_TIMEOUT_S):
                await group.ready()
        except TimeoutError:
            await in_thread(partial(_require_room, wanted))
            raise StartError(
                f"placement: there is no room for the run: {await in_thread(_resources)}; wait for other jobs, or lower"
                " placement.*"
            ) from None

    def _spawn(self, name: str, build: Callable[[], Any]) -> Any:
        placement = self._placements.actors.get(place_of(name)) or self._placement_beside(name)
        options: dict[str, Any] = {"num_cpus": placement.cpus, "num_gpus": placement.gpus}
        if placement.bundle is not None:
            assert self._group is not None, "actors are placed after the group was reserved"
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=placement.bundle
            )
        if self._inputs.config.emulation is None:
            # Emulated actors do without: a process with an environment of its own is not one of those that Ray keeps
            # ready.
            threads = str(placement.threads)
            options["runtime_env"] = {"env_vars": {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}}
        self._actors[name] = (
            actor_class().options(name=f"{self._run.run_id}/{self._attempt}/{name}", **options).remote(build)
        )
        return self._proxy(name)

    def _placement_beside(self, name: str) -> ActorPlacement:
        """Returns the placement of a worker that the job did not begin with. A Ray that was started for this run counts
        the CPUs that the run asked for at its start, not those of the machine: one more worker shares them."""
        resources = getattr(self._inputs.config.placement, "reward" if name.startswith("reward") else "rollout")
        emulated, shared = self._inputs.config.emulation is not None, self._has_own_ray
        cpus = 0.0 if emulated or shared else resources.cpus
        return ActorPlacement(None, cpus, 0.0 if emulated else resources.gpus, max(1, int(resources.cpus)))

    async def _locate(self, name: str) -> None:
        self._where[name] = await self._actors[name].whereabouts.remote()

    def _spawn_producer(self, name: str) -> Any:
        return self._spawn(name, partial(_producer, name, self._inputs, self.coordinator))

    def _spawn_reader(self, name: str) -> Any:
        return self._spawn(name, partial(_reader, name, self._inputs, self.coordinator))

    def _spawn_rewarder(self, name: str) -> Any:
        return self._spawn(name, partial(_rewarder, name, self._inputs, self.coordinator))

    def _proxy(self, name: str) -> Any:
        return Proxy(name, self._actors[name])

    # ---- running -----------------------------------------------------------------------------------------------------

    def workers(self) -> dict[str, Coroutine[Any, Any, Any]]:
        return {name: self._run_watched(name) for name in self._actors if name.startswith(("rollout", "reward"))}

    def work(self) -> dict[str, Coroutine[Any, Any, Any]]:
        return {
            name: self._run_watched(name) for name in self._actors if name.startswith("reader") or name == "trainer"
        }

    def services(self) -> dict[str, Coroutine[Any, Any, Any]]:
        watched = [name for name in self._actors if name == "coordinator" or name.startswith("trainer-")]
        health = {f"health of {name}": self._watch(name) for name in watched}
        return {"Ray": self._watch_ray(), "publisher": self._proxy("trainer").run_publisher(), **health}

    async def _watch_ray(self) -> None:
        """Raises PeerLost when Ray itself is gone."""
        if self._connection is None:
            await asyncio.Event().wait()  # it was not this cluster that connected
            return
        raise PeerLost(f"Ray is gone: {await self._connection.lost(self._inputs.config.run.health_timeout_s)}")

    async def _run_watched(self, name: str) -> None:
        """Runs a worker until its work is done. Raises PeerLost if it dies or hangs."""
        await first_of(self._proxy(name).run(), self._watch(name))

    async def _watch(self, name: str) -> None:
        deadline = self._inputs.config.run.health_timeout_s
        while True:
            await asyncio.sleep(min(_HEALTH_INTERVAL_S, deadline / 4))
            await self._check(name)

    async def _check(self, name: str) -> None:
        """Raises PeerLost unless the actor answers in time."""
        deadline = self._inputs.config.run.health_timeout_s
        try:
            async with asyncio.timeout(deadline):
                await self._actors[name].ping.remote()
        except TimeoutError:
            raise PeerLost(f"{name} has not answered for {deadline:g} s") from None
        except (ray.exceptions.RayError, KeyError):
            raise PeerLost(f"{name} is gone") from None

    async def preempt(self) -> None:
        await self._proxy("trainer").preempt()

    async def find_lost(self) -> str | None:
        found: str | None = None
        try:
            async with asyncio.TaskGroup() as checks:  # the first that is lost ends the others
                for name in self._actors:
                    if name.startswith(("coordinator", "trainer")):
                        checks.create_task(self._check(name))
        except* PeerLost as lost:
            found = str(lost.exceptions[0])
        return found

    def parts(self) -> dict[str, dict[str, Any]]:
        return {
            name: {"pid": where.pid, "node": where.node} for name, where in self._where.items() if name in self._actors
        }

    # ---- starting and removing workers -------------------------------------------------------------------------------

    async def remove_worker(self, name: str, reason: str) -> None:
        """Ends the worker's process, and with it what it stored."""
        await self._end(name)
        if name.startswith("reward"):
            await self.coordinator.scorer_lost(name)
            return
        await self._proxy("trainer").remove_engine(name)
        await self.coordinator.engine_lost(name, reason)
        await self.coordinator.objects_lost(name)

    async def start_worker(self, name: str) -> Coroutine[Any, Any, Any]:
        """Starts a worker and returns its work. Raises StartError if it is not ready in time: there may be no room for
        it."""
        timeout = self._inputs.config.run.startup_timeout_s
        worker = await in_thread(
            partial(self._spawn_rewarder if name.startswith("reward") else self._spawn_producer, name)
        )
        try:
            async with asyncio.timeout(timeout) as deadline:
                await worker.start()
                await self._locate(name)
            if not name.startswith("reward"):
                await self.coordinator.engine_joins(name)
                await self._proxy("trainer").admit(name, worker)
        except BaseException as error:
            await self._end(name)
            # The roles to notify may be gone too; the first error is what counts, a cancellation above all.
            with contextlib.suppress(Exception):
                if not name.startswith("reward"):
                    await self._proxy("trainer").remove_engine(name)
                    await self.coordinator.engine_lost(name, "it did not join")
            if isinstance(error, TimeoutError) and deadline.expired():
                raise StartError(
                    f"{name} was not ready within run.startup_timeout_s = {timeout:g}: {await in_thread(_resources)}"
                ) from None
            raise
        return self._run_watched(name)

    async def drain_worker(self, name: str) -> None:
        await self._proxy(name).leave()

    async def _end(self, name: str) -> None:
        actor, where = self._actors.pop(name, None), self._where.pop(name, None)
        if where is not None:
            await asyncio.to_thread(end_process, where)
        if actor is not None:
            ray.kill(actor)

    async def close(self) -> None:
        """Frees the run's actors, its placement group, and Ray itself if it was started for the run, which ends
        everything in it."""
        connection, self._connection = self._connection, None
        if connection is None or not (connection.is_lost or (connection.started and connection.local)):
            with contextlib.suppress(TimeoutError):  # no answer: the cluster's owner will find that out
                async with asyncio.timeout(_CLOSING_S):
                    await in_thread(self._free)
        if connection is not None:
            await in_thread(connection.close)

    def _free(self) -> None:
        with (
            contextlib.ExitStack() as then
        ):  # each step is taken, whatever becomes of those before it: Ray itself may be broken
            group, self._group = self._group, None
            if group is not None:
                then.callback(remove_placement_group, group)
            self._end_all()

    def _end_all(self) -> None:
        actors, self._actors = self._actors, {}
        where, self._where = self._where, {}
        for actor in actors.values():
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(actor)
        if where and ray.is_initialized():
            here = ray.get_runtime_context().get_node_id()
            # Workers on other nodes were ended by Ray. A trainer or a coordinator that was not would write where the
            # next attempt does.
            ending = [
                one for name, one in where.items() if one.node == here or name.startswith(("trainer", "coordinator"))
            ]
            with ThreadPoolExecutor(max(1, len(ending))) as threads:
                list(threads.map(end_process, ending))


class _DriverStore(RayStore):
    """A store that copies what it reads: giving memory of Ray's back to a Ray that is gone ends the process at once."""

    async def get(self, reference: Any) -> Any:
        return copy.deepcopy(await super().get(reference))


def _require_room(wanted: list[dict[str, float]]) -> None:
    """Raises StartError if all machines together, were they free, are too small."""
    have = ray.cluster_resources()
    need = {kind: sum(bundle.get(kind, 0) for bundle in wanted) for kind in ("CPU", "GPU")}
    if any(need[kind] > have.get(kind, 0) for kind in need):
        raise StartError(
            f"placement: the run needs {need['CPU']:g} CPUs and {need['GPU']:g} GPUs, the cluster has "
            f"{have.get('CPU', 0):g} and {have.get('GPU', 0):g} in all; lower placement.* or the numbers of workers"
        )


def _resources() -> str:
    have, free = ray.cluster_resources(), ray.available_resources()
    return ", ".join(
        f"{free.get(kind, 0):g} of {have.get(kind, 0):g} {kind}s are free" for kind in ("CPU", "GPU") if kind in have
    )


# Functions that each actor calls in its own process to build its role.


def _coordinator(inputs: RunInputs, run_id: str, ledger: str) -> Any:
    return roles.build_coordinator(inputs, run_id, ledger)


def _producer(name: str, inputs: RunInputs, coordinator: Any) -> Any:
    if inputs.profile is None and inputs.config.rollout.engine != "emulated":
        roles.limit_threads(inputs.config.placement.rollout.cpus)
    return roles.build_producer(name, inputs, coordinator, RayStore())


def _reader(name: str, inputs: RunInputs, coordinator: Any) -> Any:
    roles.limit_threads(inputs.config.placement.rollout.cpus)
    return roles.build_reader(name, inputs, coordinator, RayStore())


def _rewarder(name: str, inputs: RunInputs, coordinator: Any) -> Any:
    return roles.build_rewarder(name, inputs, coordinator, RayStore())


def _rank(rank: int, inputs: RunInputs) -> Any:
    roles.limit_threads(inputs.config.placement.trainer.cpus)
    return roles.build_rank(rank, inputs, RayStore())


def _trainer(
    inputs: RunInputs, others: list[Any], producers: dict[str, Any], coordinator: Any, checkpoints: str, weights: str
) -> Any:
    if inputs.profile is None:
        roles.limit_threads(inputs.config.placement.trainer.cpus)
    host, store = ray.util.get_node_ip_address(), RayStore()
    publisher = roles.build_publisher(inputs.config, producers, coordinator, store, weights, host)
    return roles.build_trainer(inputs, others, coordinator, publisher, store, checkpoints, host)
