"""Every role a long-lived Ray actor. A local Ray starts by itself; `run.ray_address` joins a cluster instead; a Ray that this process has
started already is used as it is, and left running.

Actors are placed as one placement group: the job gets all it needs or says at once what is missing. Nothing clever lives here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from omni_async.config.schema import Resources
from omni_async.runtime import roles
from omni_async.runtime.placement import Seating, seating
from omni_async.runtime.preflight import RunInputs
from omni_async.runtime.ray_connection import StartError, connect
from omni_async.runtime.ray_shell import Proxy, RayStore, actor_class
from omni_async.store import ObjectStore
from omni_async.tracking.rundir import RunDirectory

# An actor whose loop has not answered for this long is hung.
_HEALTH_DEADLINE_S = 120.0
_HEALTH_INTERVAL_S = 10.0
# Resources that exist are handed out at once; the rest is for a cluster that scales up.
_PLACEMENT_TIMEOUT_S = 60.0

T = TypeVar("T")


class RayCluster:
    def __init__(self, inputs: RunInputs, run: RunDirectory) -> None:
        self._inputs = inputs
        self._run = run
        self.store: ObjectStore = RayStore()
        self._actors: dict[str, Any] = {}
        self._group: PlacementGroup | None = None
        self._seating: Seating = seating(inputs.config, self._role_names())
        self._owns_ray = False

    @property
    def coordinator(self) -> Any:
        return self._proxy("coordinator")

    # ---- coming up ----------------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Ray, then the actors side by side, then their models."""
        address = self._inputs.config.run.ray_address
        self._owns_ray = await asyncio.to_thread(connect, address, self._seating.cpus)
        await self._reserve(self._seating.bundles)
        config, timeout = self._inputs.config, self._inputs.config.run.startup_timeout_s
        self._spawn("coordinator", partial(_coordinator, self._inputs, self._run.run_id, str(self._run.ledger)))
        offline = config.data.preferences is not None
        readers = [self._spawn_reader(name) for name in config.engine_names] if offline else []
        producers = {} if offline else {name: self._spawn_producer(name) for name in config.engine_names}
        names = self._role_names()
        rewarders = [self._spawn_rewarder(name) for name in names["reward"]]
        others = [self._spawn(name, partial(_rank, rank, self._inputs)) for rank, name in enumerate(names["trainer"]) if rank > 0]
        folders = str(self._run.checkpoints), str(self._run.weights)
        trainer = self._spawn("trainer", partial(_trainer, self._inputs, others, producers, self.coordinator, *folders))
        starting = asyncio.gather(trainer.start(), *(role.start() for role in [*readers, *producers.values(), *rewarders]))
        try:
            async with asyncio.timeout(timeout) as deadline:
                await starting
        except TimeoutError:
            if not deadline.expired():
                raise  # a role's own
            raise StartError(f"the actors were not ready within run.startup_timeout_s = {timeout}") from None

    def _role_names(self) -> dict[str, list[str]]:
        config = self._inputs.config
        workers = 0 if config.data.preferences is not None else config.reward.workers
        return {
            "control": ["coordinator"],
            "rollout": list(config.engine_names),
            "reward": [f"reward-{worker}" for worker in range(workers)],
            "trainer": ["trainer", *(f"trainer-{rank}" for rank in range(1, roles.num_ranks(self._inputs)))],
        }

    async def _reserve(self, bundles: Sequence[Resources]) -> None:
        if not bundles:
            return
        wanted = [{"CPU": r.cpus, **({"GPU": r.gpus} if r.gpus else {})} for r in bundles]
        self._group = placement_group(wanted, strategy="PACK")
        try:
            async with asyncio.timeout(_PLACEMENT_TIMEOUT_S):
                await self._group.ready()
        except TimeoutError:
            have = ray.cluster_resources()
            need = {kind: sum(bundle.get(kind, 0) for bundle in wanted) for kind in ("CPU", "GPU")}
            raise StartError(
                f"placement: the run needs {need['CPU']:g} CPUs and {need['GPU']:g} GPUs, the cluster has "
                f"{have.get('CPU', 0):g} and {have.get('GPU', 0):g} in all; lower placement.* or the numbers of workers"
            ) from None

    def _spawn(self, name: str, build: Callable[[], Any]) -> Any:
        seat = self._seating.seats[name]
        options: dict[str, Any] = {"num_cpus": seat.cpus, "num_gpus": seat.gpus}
        if seat.bundle is not None:
            assert self._group is not None, "actors are placed after the group was reserved"
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=seat.bundle)
            # Emulated actors do without: a process with an environment of its own is none of those that Ray keeps ready.
            threads = str(seat.threads)
            options["runtime_env"] = {"env_vars": {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}}
        self._actors[name] = actor_class().options(name=f"{self._run.run_id}/{name}", **options).remote(build)
        return self._proxy(name)

    def _spawn_producer(self, name: str) -> Any:
        return self._spawn(name, partial(_producer, name, self._inputs, self.coordinator))

    def _spawn_reader(self, name: str) -> Any:
        return self._spawn(name, partial(_reader, name, self._inputs, self.coordinator))

    def _spawn_rewarder(self, name: str) -> Any:
        return self._spawn(name, partial(_rewarder, name, self._inputs, self.coordinator))

    def _proxy(self, name: str) -> Any:
        return Proxy(name, self._actors[name])

    # ---- running ------------------------------------------------------------------------------------------------------------------

    def work(self) -> dict[str, Coroutine[Any, Any, Any]]:
        ends = [name for name in self._actors if name.startswith(("rollout", "reader", "reward")) or name == "trainer"]
        return {name: self._proxy(name).run() for name in ends}

    def services(self) -> dict[str, Coroutine[Any, Any, Any]]:
        return {"publisher": self._proxy("trainer").run_publisher(), **{f"health of {name}": self._watch(name) for name in self._actors}}

    async def _watch(self, name: str) -> None:
        while True:
            await asyncio.sleep(_HEALTH_INTERVAL_S)
            try:
                async with asyncio.timeout(_HEALTH_DEADLINE_S):
                    await self._actors[name].ping.remote()
            except TimeoutError:
                raise RuntimeError(f"{name} has not answered for {_HEALTH_DEADLINE_S:g} s") from None

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        """Frees what is this run's: its actors, its placement group, and Ray itself if it was started for it."""
        actors, self._actors = self._actors, {}
        for actor in actors.values():
            ray.kill(actor)
        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)
        if self._owns_ray:
            ray.shutdown()
            self._owns_ray = False


# What each actor builds, in its own process.


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


def _trainer(inputs: RunInputs, others: list[Any], producers: dict[str, Any], coordinator: Any, checkpoints: str, weights: str) -> Any:
    if inputs.profile is None:
        roles.limit_threads(inputs.config.placement.trainer.cpus)
    host, store = ray.util.get_node_ip_address(), RayStore()
    publisher = roles.build_publisher(inputs.config, producers, coordinator, store, weights, host)
    return roles.build_trainer(inputs, others, coordinator, publisher, store, checkpoints, host)
