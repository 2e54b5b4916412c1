"""Asks Ray for room: accelerators by their kind, and one placement group for a whole job."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group

from omni_async.config import ConfigError
from omni_async.runtime.cluster import StartError
from omni_async.runtime.on_ray.connection import in_thread
from omni_async.runtime.placement import PlacementPlan

# Resources that exist are handed out at once; the rest is for a cluster that scales up.
_PLACEMENT_TIMEOUT_S = 60.0
# Ray's names, in the order in which `auto` looks for them.
KINDS = ("GPU", "NPU")


def accelerator_kind(asked: str) -> str:
    """Return Ray's name of the accelerators that `placement.accelerator` asks for."""
    if asked != "auto":
        return asked
    have = ray.cluster_resources()
    return next((kind for kind in KINDS if have.get(kind)), KINDS[0])


def actor_options(kind: str, cpus: float, gpus: float) -> dict[str, Any]:
    """Return what an actor asks Ray for. Ray hides from its process all accelerators but its own.

    Args:
        kind: Ray's name of the run's accelerators, as `accelerator_kind` returns it.
        cpus: how many.
        gpus: how many accelerators, of whatever kind; a fraction shares one."""
    if kind == "GPU":
        return {"num_cpus": cpus, "num_gpus": gpus}
    return {"num_cpus": cpus, "num_gpus": 0, **({"resources": {kind: gpus}} if gpus else {})}


async def reserve(plan: PlacementPlan, kind: str, grows: bool) -> PlacementGroup:
    """Return the job's placement group, which may have to wait for its room.

    Args:
        plan: the room that the job needs.
        kind: Ray's name of its accelerators.
        grows: whether Ray may get more machines.

    Raises:
        ConfigError: there is no accelerator of this kind; if Ray grows, only where it has another kind.
        StartError: all machines together are too small, and Ray does not grow."""
    wanted = _bundles(plan, kind)
    if not grows:
        await in_thread(partial(_require_room, wanted, kind))
    elif plan.gpus:
        await in_thread(partial(_require_kind, plan.gpus, kind))
    group: PlacementGroup = await in_thread(partial(placement_group, wanted, strategy=plan.strategy))
    return group


async def wait_for_room(group: PlacementGroup, plan: PlacementPlan, kind: str) -> None:
    """Wait until the group has its room.

    Args:
        group, plan, kind: what `reserve` returned, and was given.

    Raises:
        ConfigError: no accelerator of this kind came in a minute.
        StartError: other room was missing for a minute: the machines are too small, or other jobs have them."""
    try:
        async with asyncio.timeout(_PLACEMENT_TIMEOUT_S):
            await group.ready()
    except TimeoutError:
        await in_thread(partial(_require_room, _bundles(plan, kind), kind))
        raise StartError(
            f"placement: there is no room for the run{' on one machine' * (plan.strategy == 'STRICT_PACK')}:"
            f" {await in_thread(what_is_free)}; wait for other jobs, or lower placement.*"
        ) from None


def _bundles(plan: PlacementPlan, kind: str) -> list[dict[str, float]]:
    return [{"CPU": one.cpus, **({kind: one.gpus} if one.gpus else {})} for one in plan.bundles]


def _require_kind(asked: float, kind: str) -> None:
    """Raise ConfigError if the cluster has accelerators, and none of this kind.

    One that has none at all may be about to get some."""
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

    Raises ConfigError if they have no such accelerator."""
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


def what_is_free() -> str:
    have, free = ray.cluster_resources(), ray.available_resources()
    return ", ".join(
        f"{free.get(kind, 0):g} of {have.get(kind, 0):g} {kind}s are free" for kind in ("CPU", *KINDS) if kind in have
    )
