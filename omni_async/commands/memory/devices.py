"""Lists the memory of accelerators by name, and finds the processes of a recipe that share one. Imports no torch."""

from __future__ import annotations

from omni_async.commands.memory.amounts import GIB
from omni_async.config import Config, ConfigError
from omni_async.plugins.entry_points import not_one_of
from omni_async.runtime.placement import plan_placements
from omni_async.worker import Worker

# GiB available to a process, as torch reports a device's total memory.
DEVICES = {"h100-80g": 79.1, "h200": 139.8, "h800": 79.1, "ascend-64g": 60.9}


def bytes_of_device(text: str) -> int:
    """Return the bytes of a named device, or of a number of GiB. ConfigError for anything else."""
    if text in DEVICES:
        return int(DEVICES[text] * GIB)
    try:
        number = float(text)
    except ValueError:
        raise ConfigError(f"--device: {not_one_of(text, DEVICES, ' or a number of GiB')}") from None
    if not 0.001 <= number < 1e6:
        raise ConfigError(f"--device: expected a number of GiB from 0.001 to a million, got {text}")
    return int(number * GIB)


def shared_devices(config: Config) -> list[tuple[str, ...]]:
    """Return the roles of the processes on each accelerator, a tuple for every different device, sorted.

    Ray places actors with a fraction of an accelerator in the order of their bundles, on the first one with room."""
    plan = plan_placements(config)
    found: list[tuple[float, list[str]]] = []
    for number, bundle in enumerate(plan.bundles):
        if bundle.gpus == 0:
            continue
        members = {slot: actor.gpus for slot, actor in plan.actors.items() if actor.bundle == number and actor.gpus > 0}
        roles = [Worker.parse(slot).role for slot in members]
        if config.placement.colocated or bundle.gpus < 1:
            _put(found, bundle.gpus, roles)
        else:
            for gpus, role in zip(members.values(), roles, strict=True):
                _put(found, min(1.0, gpus), [role])
    return sorted({tuple(sorted(roles)) for _, roles in found})


def _put(devices: list[tuple[float, list[str]]], gpus: float, roles: list[str]) -> None:
    """Add processes to the first device that has room for `gpus` more."""
    for i, (used, there) in enumerate(devices):
        if used + gpus <= 1:
            devices[i] = used + gpus, [*there, *roles]
            return
    devices.append((gpus, roles))
