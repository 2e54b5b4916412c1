"""Every role a long-lived Ray actor. A local Ray starts by itself; `run.ray_address` joins a cluster instead.

Actors are placed as one placement group: the job gets all it needs or says at once what is missing. Nothing clever lives here.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from omni_async.config.schema import Resources
from omni_async.runtime import roles
from omni_async.runtime.preflight import RunInputs
from omni_async.runtime.ray_shell import Proxy, RayStore, actor_class
from omni_async.store import ObjectStore
from omni_async.tracking.rundir import RunDirectory

_CONTROL = Resources(cpus=0.01)
# An actor whose loop has not answered for this long is hung.
_HEALTH_DEADLINE_S = 120.0
_HEALTH_INTERVAL_S = 10.0
# Resources that exist are handed out at once; the rest is for a cluster that scales up.
_PLACEMENT_TIMEOUT_S = 60.0

T = TypeVar("T")


class StartError(RuntimeError):
    """The cluster could not be brought up; the text says what to do."""


class RayCluster:
    def __init__(self, inputs: RunInputs, run: RunDirectory) -> None:
        self._inputs = inputs
        self._run = run
        self.store: ObjectStore = RayStore()
        self._actors: dict[str, Any] = {}
        self._group: PlacementGroup | None = None
        self._owns_ray = False

    @property
    def coordinator(self) -> Any:
        return self._proxy("coordinator")

    # ---- coming up ----------------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Ray, then the actors side by side, then their models."""
        bundles = self._bundles()
        await asyncio.to_thread(self._connect, math.ceil(sum(resources.cpus for resources in bundles.values())))
        await self._reserve(bundles)
        config, timeout = self._inputs.config, self._inputs.config.run.startup_timeout_s
        self._spawn("coordinator", _CONTROL, partial(_coordinator, self._inputs, self._run.run_id, str(self._run.ledger)))
        offline = config.data.preferences is not None
        readers = [self._spawn_reader(name) for name in config.engine_names] if offline else []
        producers = {} if offline else {name: self._spawn_producer(name) for name in config.engine_names}
        rewarders = [self._spawn_rewarder(name) for name in self._rewarder_names()]
        others = [
            self._spawn(f"trainer-{rank}", config.placement.trainer, partial(_rank, rank, self._inputs))
            for rank in range(1, config.trainer.workers)
        ]
        publisher = self._spawn("publisher", _CONTROL, partial(_publisher, config, producers, self.coordinator))
        trainer = self._spawn(
            "trainer",
            config.placement.trainer,
            partial(_trainer, self._inputs, others, self.coordinator, publisher, str(self._run.checkpoints)),
        )
        starting = asyncio.gather(trainer.start(), *(role.start() for role in [*readers, *producers.values(), *rewarders]))
        try:
            async with asyncio.timeout(timeout):
                await starting
        except TimeoutError:
            raise StartError(f"the actors were not ready within run.startup_timeout_s = {timeout}") from None

    def _rewarder_names(self) -> list[str]:
        config = self._inputs.config
        return [] if config.data.preferences is not None else [f"reward-{worker}" for worker in range(config.reward.workers)]

    def _bundles(self) -> dict[str, Resources]:
        config = self._inputs.config
        placement = config.placement
        ranks = ["trainer", *(f"trainer-{rank}" for rank in range(1, config.trainer.workers))]
        return {
            "coordinator": _CONTROL,
            "publisher": _CONTROL,
            **dict.fromkeys(config.engine_names, placement.rollout),
            **dict.fromkeys(self._rewarder_names(), placement.reward),
            **dict.fromkeys(ranks, placement.trainer),
        }

    def _connect(self, cpus: int) -> None:
        address = self._inputs.config.run.ray_address
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
        logging.getLogger("ray").setLevel(logging.ERROR)
        # Set before the import takes effect in workers: vLLM and diffusers look for a hub otherwise.
        env = {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"), "RAY_DEDUP_LOGS": "0"}
        try:
            if address is None:
                # As many CPUs as the roles ask for: on a small machine they share the real ones, which is what overlap is about.
                ray.init(num_cpus=max(cpus, os.cpu_count() or 1), include_dashboard=False, runtime_env={"env_vars": env}, **quiet)
            else:
                ray.init(address=address, runtime_env={"env_vars": env}, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise StartError(f"run.ray_address: cannot start or join Ray at {address or 'this machine'}: {error}") from error
        self._owns_ray = True

    async def _reserve(self, bundles: dict[str, Resources]) -> None:
        wanted = [{"CPU": r.cpus, **({"GPU": r.gpus} if r.gpus else {})} for r in bundles.values()]
        self._bundle = {name: number for number, name in enumerate(bundles)}
        self._resources = bundles
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

    def _spawn(self, name: str, resources: Resources, build: Callable[[], Any]) -> Any:
        assert self._group is not None, "actors are placed after the group was reserved"
        threads = str(max(1, int(resources.cpus)))
        self._actors[name] = (
            actor_class()
            .options(
                name=f"{self._run.run_id}/{name}",
                num_cpus=resources.cpus,
                num_gpus=resources.gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._bundle[name]),
                runtime_env={"env_vars": {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}},
            )
            .remote(build)
        )
        return self._proxy(name)

    def _spawn_producer(self, name: str) -> Any:
        return self._spawn(name, self._resources[name], partial(_producer, name, self._inputs, self.coordinator))

    def _spawn_reader(self, name: str) -> Any:
        return self._spawn(name, self._resources[name], partial(_reader, name, self._inputs, self.coordinator))

    def _spawn_rewarder(self, name: str) -> Any:
        return self._spawn(name, self._resources[name], partial(_rewarder, name, self._inputs.config, self.coordinator))

    def _proxy(self, name: str) -> Any:
        return Proxy(name, self._actors[name])

    # ---- running ------------------------------------------------------------------------------------------------------------------

    def work(self) -> dict[str, Coroutine[Any, Any, Any]]:
        ends = [name for name in self._actors if name.startswith(("rollout", "reader", "reward")) or name == "trainer"]
        return {name: self._proxy(name).run() for name in ends}

    def services(self) -> dict[str, Coroutine[Any, Any, Any]]:
        return {"publisher": self._proxy("publisher").run(), **{f"health of {name}": self._watch(name) for name in self._actors}}

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
        if not self._owns_ray:
            return
        for actor in self._actors.values():
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)
        ray.shutdown()
        self._owns_ray = False


# What each actor builds, in its own process.


def _coordinator(inputs: RunInputs, run_id: str, ledger: str) -> Any:
    return roles.build_coordinator(inputs, run_id, ledger)


def _producer(name: str, inputs: RunInputs, coordinator: Any) -> Any:
    if inputs.config.rollout.engine != "emulated":
        roles.limit_threads(inputs.config.placement.rollout.cpus)
    return roles.build_producer(name, inputs, coordinator, RayStore())


def _reader(name: str, inputs: RunInputs, coordinator: Any) -> Any:
    roles.limit_threads(inputs.config.placement.rollout.cpus)
    return roles.build_reader(name, inputs, coordinator, RayStore())


def _rewarder(name: str, config: Any, coordinator: Any) -> Any:
    return roles.build_rewarder(name, config, coordinator, RayStore())


def _publisher(config: Any, producers: dict[str, Any], coordinator: Any) -> Any:
    return roles.build_publisher(config, producers, coordinator)


def _rank(rank: int, inputs: RunInputs) -> Any:
    roles.limit_threads(inputs.config.placement.trainer.cpus)
    return roles.build_rank(rank, inputs, RayStore())


def _trainer(inputs: RunInputs, others: list[Any], coordinator: Any, publisher: Any, checkpoints: str) -> Any:
    roles.limit_threads(inputs.config.placement.trainer.cpus)
    host = ray.util.get_node_ip_address()
    return roles.build_trainer(inputs, others, coordinator, publisher, RayStore(), checkpoints, host)
