"""Plans where every actor runs: in which bundle of the job's placement group, and with which resources. Pure arithmetic
on the configuration.

An actor on its own device has a bundle of its own. With `placement.colocated` device d is one bundle, and engine d,
reward worker d and rank d ask for a share of it each. Emulated devices are not the machine's: their actors ask for
nothing and run anywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from omni_async.config import Config
from omni_async.config.schema import Resources

CONTROL = Resources(cpus=0.01)
# Ray counts resources in ten-thousandths.
_PRECISION = 10_000


@dataclass(frozen=True)
class ActorPlacement:
    """The placement of an actor. `bundle` is None where no placement group is needed. `cpus` and `gpus` are what the
    actor asks for, `threads` what it may use."""

    bundle: int | None
    cpus: float
    gpus: float
    threads: int


@dataclass(frozen=True)
class PlacementPlan:
    bundles: tuple[Resources, ...]
    actors: dict[str, ActorPlacement]

    @property
    def cpus(self) -> int:
        return math.ceil(sum(bundle.cpus for bundle in self.bundles))

    @property
    def gpus(self) -> float:
        return sum(bundle.gpus for bundle in self.bundles)


def role_names(config: Config) -> dict[str, list[str]]:
    """Returns the actors of a job by role, worker 0 first."""
    workers = 0 if config.data.preferences is not None else config.reward.workers
    ranks = config.trainer.workers if config.emulation is None else 1  # one emulated rank stands for all
    return {
        "control": ["coordinator"],
        "rollout": list(config.engine_names),
        "reward": [f"reward-{worker}" for worker in range(workers)],
        "trainer": ["trainer", *(f"trainer-{rank}" for rank in range(1, ranks))],
    }


def plan_placements(config: Config, roles: dict[str, list[str]]) -> PlacementPlan:
    """Assigns every actor a bundle and its resources. `roles` are the actors' names under `control`, `rollout`,
    `reward` and `trainer`, worker 0 first."""
    names = [name for of_role in roles.values() for name in of_role]
    if config.emulation is not None:
        return PlacementPlan((), {name: ActorPlacement(None, 0.0, 0.0, 1) for name in names})
    asked = {"control": CONTROL, **{role: getattr(config.placement, role) for role in ("rollout", "reward", "trainer")}}
    bundles: list[Resources] = []
    actors: dict[str, ActorPlacement] = {}
    for members in _bundles(roles, config.placement.colocated):
        wanted = [asked[role] for role, _ in members]
        together = Resources(cpus=max(r.cpus for r in wanted), gpus=max(r.gpus for r in wanted))
        for (_, name), resources in zip(members, wanted, strict=True):
            cpus = _share(resources.cpus, sum(r.cpus for r in wanted), together.cpus)
            gpus = _share(resources.gpus, sum(r.gpus for r in wanted), together.gpus)
            actors[name] = ActorPlacement(len(bundles), cpus, gpus, max(1, int(resources.cpus)))
        bundles.append(together)
    return PlacementPlan(tuple(bundles), actors)


def _bundles(roles: dict[str, list[str]], colocated: bool) -> list[list[tuple[str, str]]]:
    """Returns the (role, actor) pairs of each bundle."""
    alone = [(role, name) for role, names in roles.items() for name in names if role == "control" or not colocated]
    if not colocated:
        return [[pair] for pair in alone]
    sharing = {role: names for role, names in roles.items() if role != "control"}
    devices = max(len(names) for names in sharing.values())
    return [
        *([pair] for pair in alone),
        *([(r, names[d]) for r, names in sharing.items() if d < len(names)] for d in range(devices)),
    ]


def _share(wanted: float, of: float, available: float) -> float:
    """Returns an actor's part of what the bundle has, rounded down so that all parts fit; everything if no other actor
    wants any."""
    if wanted in (0, of):
        return wanted
    return math.floor(wanted / of * available * _PRECISION) / _PRECISION
