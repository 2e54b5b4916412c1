"""Keeps the addresses of services; the control plane decides nothing about them."""

from __future__ import annotations

from collections.abc import Collection

from omni_async.worker import Worker


class Addresses:
    """The addresses of the ready workers of services, by worker. `roles`: the services of the recipe."""

    def __init__(self, roles: Collection[str]) -> None:
        self._roles = [*roles]
        self.ready: dict[str, str] = {}

    def of(self, role: str) -> dict[str, str]:
        """Return the addresses of a service's ready workers, by name.

        Raises ValueError for a role that the recipe does not name, because no worker of it would ever be ready."""
        if role not in self._roles:
            raise ValueError(f"addresses: expected a role of the recipe, one of {self._roles}, got {role!r}")
        return {name: address for name, address in self.ready.items() if Worker.parse(name).role == role}
