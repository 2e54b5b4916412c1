"""Plans where every actor runs: its bundle of the job's placement group, and its resources.

Pure arithmetic on the configuration.

A bundle fits on one machine:
- An actor with its own device has its own bundle.
- The ranks of a sequence group share one, because they exchange a row's tokens in every layer.
- With `placement.colocated`, device d is one bundle, and engine d, reward worker d and rank d each request a share of
  it. Sequence groups then keep the whole job on one machine.
- Emulated devices do not belong to the machine: their actors request nothing and run anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from omni_async.config import Config
from omni_async.config.role_table import RoleSpec, roles_of
from omni_async.config.section import Resources
from omni_async.worker import Worker

# Ray counts resources in ten-thousandths.
_PRECISION = 10_000

Member = tuple[RoleSpec, Worker]


@dataclass(frozen=True)
class ActorPlacement:
    """The placement of an actor.

    `bundle` is None if the actor needs no placement group. `cpus` and `gpus` are requested resources; `threads` is the
    number of threads that the actor may use."""

    bundle: int | None
    cpus: float
    gpus: float
    threads: int


@dataclass(frozen=True)
class PlacementPlan:
    """The bundles of a job and its actors' placements by slot id.

    `strategy`: how Ray spreads the bundles over machines, as Ray names it."""

    bundles: tuple[Resources, ...]
    actors: dict[str, ActorPlacement]
    strategy: Literal["PACK", "STRICT_PACK"] = "PACK"

    @property
    def cpus(self) -> int:
        return math.ceil(sum(bundle.cpus for bundle in self.bundles))

    @property
    def gpus(self) -> float:
        return sum(bundle.gpus for bundle in self.bundles)


def plan_placements(config: Config) -> PlacementPlan:
    """Assign every actor a bundle and its resources."""
    table = roles_of(config)
    bundles: list[Resources] = []
    actors: dict[str, ActorPlacement] = {}
    for spec in table.values():
        for worker in spec.workers(config):
            actors[worker.slot] = ActorPlacement(None, 0.0, 0.0, 1)
    for members, shared in _bundles(table, config):
        wanted = [spec.resources(config) for spec, _ in members]
        total = Resources(cpus=sum(r.cpus for r in wanted), gpus=sum(r.gpus for r in wanted))
        bundle = Resources(cpus=max(r.cpus for r in wanted), gpus=max(r.gpus for r in wanted)) if shared else total
        for (_, worker), resources in zip(members, wanted, strict=True):
            cpus, gpus = resources.cpus, resources.gpus
            if shared:
                cpus, gpus = _share(cpus, total.cpus, bundle.cpus), _share(gpus, total.gpus, bundle.gpus)
            actors[worker.slot] = ActorPlacement(len(bundles), cpus, gpus, max(1, int(resources.cpus)))
        bundles.append(bundle)
    one_machine = config.placement.colocated and config.trainer.sequence_parallel > 1 and config.emulation is None
    return PlacementPlan(tuple(bundles), actors, "STRICT_PACK" if one_machine else "PACK")


def _bundles(table: dict[str, RoleSpec], config: Config) -> Iterator[tuple[list[Member], bool]]:
    """Yield the members of each bundle, and whether they take turns on its devices."""
    colocated = config.placement.colocated
    devices: list[list[Member]] = []
    for spec in table.values():
        if config.emulation is not None and spec.emulated:
            continue
        workers = spec.workers(config)
        if not (colocated and spec.colocated):
            yield from (([(spec, worker) for worker in group], False) for group in _groups(spec, workers, config))
            continue
        devices += [[] for _ in range(len(workers) - len(devices))]
        for device, worker in zip(devices, workers, strict=False):
            device.append((spec, worker))
    yield from ((members, True) for members in devices)


def _groups(spec: RoleSpec, workers: tuple[Worker, ...], config: Config) -> Iterator[tuple[Worker, ...]]:
    """Yield the workers that need the same machine."""
    size = config.trainer.sequence_parallel if spec.in_sequence_groups else 1
    for start in range(0, len(workers), size):
        yield workers[start : start + size]


def _share(wanted: float, of: float, available: float) -> float:
    """Return an actor's share of the bundle's resource, rounded down so that all shares fit.

    It is the whole resource if no other actor requests any."""
    if wanted in (0, of):
        return wanted
    return math.floor(wanted / of * available * _PRECISION) / _PRECISION
