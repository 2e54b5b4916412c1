"""Compares an estimate with a device: which devices of a run hold more than they have, and what would help."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from omni_async.commands.memory.amounts import GIB, Amount

_TIGHT = 0.9  # above it, a fragmented allocator or a kernel's workspace may need the rest


@dataclass(frozen=True)
class Device:
    """An accelerator of a run.

    roles: those of its processes. nbytes: what these hold. spare: the part of it that may be less. unknown: the roles
    whose weights are not known. capacity: bytes of the device."""

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
        """Return whether it fits, in a word or two."""
        if not self.fits:
            return f"does not fit, {(self.nbytes - self.capacity) / GIB:.1f} GiB too much"
        if self.unknown:
            return f"at least; the model of {', '.join(self.unknown)} is not known"
        return "tight: less than 10 % is left" if self.nbytes - self.spare > _TIGHT * self.capacity else "fits"


def judge(roles: Iterable[Amount], devices: Iterable[tuple[str, ...]], capacity: int) -> list[Device]:
    """Return what devices hold.

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
    """Return the keys that make smaller what a device holds."""
    return [help_ for amount in roles if amount.role in device.roles for help_ in amount.helps]
