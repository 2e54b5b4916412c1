"""Builds each role of the table where its worker runs: in the driver's process, or in one of its own."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omni_async.actors.service import ServiceHost, ServiceNotStarted
from omni_async.aio.clock import Clock
from omni_async.config.secret_references import with_secrets
from omni_async.runtime import roles
from omni_async.runtime.preflight import RunInputs
from omni_async.services import Service, ServiceSite, find_service
from omni_async.store import ObjectStore
from omni_async.tracking.rundir import RunDirectory
from omni_async.worker import Worker


@dataclass(frozen=True)
class Site:
    """What a worker is built with. `folder`: the run's. `peers`: the workers that it calls, by name. `host`: the
    address of the worker's machine. `own_process`: whether the worker has a process, and the threads in it, for
    itself."""

    worker: Worker
    inputs: RunInputs
    folder: Path
    store: ObjectStore
    peers: Mapping[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    clock: Clock | None = None
    own_process: bool = False

    @property
    def coordinator(self) -> Any:
        return self.peers[str(Worker("coordinator"))]

    def limit_threads(self, cpus: float) -> None:
        """Keeps torch to the worker's share of the machine."""
        if self.own_process:
            roles.limit_threads(cpus)


def build(path: str, site: Site) -> Any:
    """Builds a worker. `path`: what its row says that builds it."""
    module, _, function = path.partition(":")
    return getattr(importlib.import_module(module), function)(site)


# ---- what the rows name --------------------------------------------------------------------------------------------


def coordinator(site: Site) -> Any:
    run = RunDirectory(site.folder)
    return roles.build_coordinator(site.inputs, run.run_id, str(run.ledger))


def producer(site: Site) -> Any:
    inputs = site.inputs
    if inputs.profile is None and inputs.config.rollout.engine != "emulated":
        site.limit_threads(inputs.config.placement.rollout.cpus)
    return roles.build_producer(str(site.worker), inputs, site.coordinator, site.store, site.clock)


def reader(site: Site) -> Any:
    site.limit_threads(site.inputs.config.placement.rollout.cpus)
    return roles.build_reader(str(site.worker), site.inputs, site.coordinator, site.store)


def rewarder(site: Site) -> Any:
    return roles.build_rewarder(str(site.worker), site.inputs, site.coordinator, site.store, site.clock)


def trainer(site: Site) -> Any:
    """Builds rank 0 with the trainer and the publisher around it, or one of the other ranks."""
    inputs, run = site.inputs, RunDirectory(site.folder)
    if inputs.profile is None:
        site.limit_threads(inputs.config.placement.trainer.cpus)
    if site.worker.index is not None:
        return roles.build_rank(site.worker.index, inputs, site.store)
    producers = {name: peer for name, peer in site.peers.items() if Worker.parse(name).role == "rollout"}
    ranks = {name: peer for name, peer in site.peers.items() if Worker.parse(name).role == site.worker.role}
    others = [ranks[name] for name in sorted(ranks, key=lambda name: Worker.parse(name).index or 0)]
    publisher = roles.build_publisher(
        inputs.config, producers, site.coordinator, site.store, str(run.weights), site.host, site.clock
    )
    return roles.build_trainer(
        inputs, others, site.coordinator, publisher, site.store, str(run.checkpoints), site.host, site.clock
    )


def service(site: Site) -> ServiceHost:
    """Builds a worker of a role that another package brings."""
    name, config, role = str(site.worker), site.inputs.config, site.worker.role
    (section,) = (one for one in config.roles if one.name == role)
    where = ServiceSite(
        name,
        site.worker.index or 0,
        config,
        with_secrets(section.settings, f"roles: settings of {role!r}"),
        site.host,
        site.coordinator.phase,
        site.coordinator.addresses,
    )
    try:
        made = find_service(role).load()(where)
    except Exception as error:
        raise ServiceNotStarted(f"{name} was not built: {type(error).__name__}: {error}") from error
    if not isinstance(made, Service):
        raise ServiceNotStarted(f"{name} was not built: expected a Service, got a {type(made).__name__}")
    return ServiceHost(name, made, site.coordinator)
