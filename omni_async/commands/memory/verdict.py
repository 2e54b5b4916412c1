"""Compares an estimate with a device: finds overfull devices of a run, and ways to reduce their memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from omni_async.commands.memory.amounts import GIB, Amount

_TIGHT = 0.9  # above it, a fragmented allocator or a kernel's workspace may need the rest


@dataclass(frozen=True)
class Device:
    """An accelerator of a run.

    roles: the roles of its processes.
    nbytes: the memory of these processes.
    spare: the part of it that may shrink.
    unknown: the roles with unknown weights.
    capacity: bytes of the device."""

    roles: tuple[str, ...]
    nbytes: int
    spare: int
    unknown: tuple[str, ...]
    capacity: int

    @property
    def fits(self) -> bool:
        return self.nbytes <= self.capacity

    @property
    def verdict(self) -> str:
        """Return whether it fits, in a few words."""
        if not self.fits:
            return f"does not fit, {(self.nbytes - self.capacity) / GIB:.1f} GiB too much"
        if self.unknown:
            return f"at least; the model of {', '.join(self.unknown)} is not known"
        return "tight: less than 10 % is left" if self.nbytes - self.spare > _TIGHT * self.capacity else "fits"


def judge(roles: Iterable[Amount], devices: Iterable[tuple[str, ...]], capacity: int) -> list[Device]:
    """Return the memory of the devices.

    Args:
        roles: the estimate's.
        devices: the roles on each different device.
        capacity: bytes of a device."""
    by_role = {amount.role: amount for amount in roles}
    found = []
    for names in devices:
        amounts = [by_role[name] for name in names if name in by_role]
        unknown = [one for one in names if one not in by_role or by_role[one].weights is None]
        total, spare = sum(amount.device for amount in amounts), sum(amount.spare for amount in amounts)
        found.append(Device(names, total, spare, tuple(dict.fromkeys(unknown)), capacity))
    return found


def ways_out(device: Device, roles: Iterable[Amount]) -> list[str]:
    """Return the keys that reduce the memory of a device."""
    return [help_ for amount in roles if amount.role in device.roles for help_ in amount.helps]
