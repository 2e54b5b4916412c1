"""Defines named schedules: values of ordinary keys that give the baselines and the asynchronous loop in one runtime.

| schedule         | generation, scoring and training                                                        |
|------------------|-----------------------------------------------------------------------------------------|
| `sync`           | one after the other, each on its own devices                                            |
| `sync_colocated` | one after the other, each on all devices                                                |
| `async_reward`   | samples are scored while others are generated; then the update is trained               |
| `one_step_off`   | the next update's samples are generated while one is trained; both wait for each other, |
|                  | and for the weights                                                                     |
| `async`          | nothing waits except for the budget `staleness.max_updates`                             |

A schedule replaces its keys in the recipe. `async` leaves the staleness budget to the recipe.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from omni_async.config.ray_cluster import cluster_address
from omni_async.config.schema import Config, ScheduleName
from omni_async.config.section import Resources

_IN_STEP = {
    "reward.streaming": False,
    "trainer.streaming": "off",
    "staleness.max_updates": 0,
    "weights.publish_every": 1,
}
_OVERLAPPED = {
    "reward.streaming": True,
    "trainer.streaming": "auto",
    "weights.swap": "step",
    "placement.colocated": False,
}

# The keys that each schedule sets, as paths.
SCHEDULES: dict[ScheduleName, dict[str, Any]] = {
    "sync": {**_IN_STEP, "placement.colocated": False},
    "sync_colocated": {**_IN_STEP, "placement.colocated": True},
    "async_reward": {**_IN_STEP, "reward.streaming": True, "placement.colocated": False},
    "one_step_off": {
        "staleness.max_updates": 1,
        "weights.publish_every": 1,
        "weights.swap": "drain",
        "reward.streaming": True,
        "trainer.streaming": "off",
        "placement.colocated": False,
    },
    "async": _OVERLAPPED,
}


def apply_schedule(config: Config) -> Config:
    """Return the configuration with its schedule's keys set and with large enough buffers. Idempotent."""
    if config.schedule is None:
        return config
    was_colocated = config.placement.colocated
    for path, value in SCHEDULES[config.schedule].items():
        section, key = path.split(".")
        config = replace(config, **{section: replace(getattr(config, section), **{key: value})})
    if config.placement.colocated and not was_colocated:
        config = _on_all_devices(config)
    return _with_room(config)


def num_devices(config: Config) -> float:
    """Count the accelerators of the job, including pools and servers, or its CPUs if it uses no accelerator.

    Shared devices count once."""
    kind, together = _kind(config), (max if config.placement.colocated else sum)
    return together(_counts(_roles(config), kind)) + sum(_counts(_services(config), kind))


def num_existing_devices(config: Config) -> float:
    """Count the job's devices on this machine: roles that request more CPUs than it has share its CPUs.

    Emulated devices, accelerators, and the devices of a joined cluster count as requested, because they were
    allocated. The roles of a run in one process share one accelerator, or all of its CPUs."""
    devices, cpus = num_devices(config), len(os.sched_getaffinity(0))
    if config.emulation is not None:
        return devices
    if config.run.runtime == "inprocess":
        return min(devices, 1.0) if _kind(config) == "gpus" else cpus
    allocated = cluster_address(config.run) is not None or _kind(config) == "gpus"
    return devices if allocated else min(devices, cpus)


def _kind(config: Config) -> str:
    roles = [*_roles(config), *_services(config)]
    return "gpus" if any(resources.gpus for _, resources in roles) else "cpus"


def _counts(roles: Sequence[tuple[int, Resources]], kind: str) -> list[float]:
    return [workers * float(getattr(resources, kind)) for workers, resources in roles]


def _roles(config: Config) -> list[tuple[int, Resources]]:
    """Return the workers and resources of rollout, reward and trainer, which may take turns on the same devices."""
    placement = config.placement
    return [
        (config.rollout.workers, placement.rollout),
        (config.reward.workers if config.scored else 0, placement.reward),
        (config.trainer.workers, placement.trainer),
    ]


def _services(config: Config) -> list[tuple[int, Resources]]:
    """Return the workers and resources of pools and servers, which have separate devices."""
    return [
        *((pool.workers, pool.resources) for pool in config.reward.pools),
        *((server.replicas, server.resources) for server in config.reward.servers),
    ]


def _on_all_devices(config: Config) -> Config:
    """Return the configuration with as many workers of each role as fit on the devices of all three together.

    The number of ranks is rounded down to whole groups that share a sequence or a copy of the weights."""
    kind = _kind(config)
    total = sum(_counts(_roles(config), kind))
    fitting = []
    for workers, resources in _roles(config):
        each = getattr(resources, kind)
        fitting.append(max(1, int(total / each)) if each else workers)  # a role without devices keeps its workers
    rollout, reward, ranks = fitting
    together = config.trainer.fewest_ranks
    return replace(
        config,
        rollout=replace(config.rollout, workers=rollout),
        reward=replace(config.reward, workers=reward),
        trainer=replace(config.trainer, workers=ranks - ranks % together or ranks),
    )


def _with_room(config: Config) -> Config:
    """Enlarge the buffers so that an update fits if it is collected as a whole."""
    buffer, per_update = config.buffer, config.trainer.groups_per_update
    if config.trainer.streaming == "off":
        buffer = replace(buffer, groups=max(buffer.groups, per_update * (config.staleness.max_updates + 1)))
    if not config.reward.streaming:
        buffer = replace(buffer, trajectories=max(buffer.trajectories, per_update * config.rollout.group_size))
    return replace(config, buffer=buffer)
