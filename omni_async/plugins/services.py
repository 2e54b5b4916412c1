"""Finds services, the roles that other packages bring: a server, a judge, a cache. Imports no torch and no Ray.

A package registers a `ServiceRole` in the entry-point group `omni_async.roles`; a recipe that names it under `roles`
gets workers of it, each in a process of its own. A worker that is lost is replaced while the run goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from omni_async.plugins.entry_points import find_registered, load_named, registered_names
from omni_async.worker import BUILT_IN_ROLES

GROUP = "omni_async.roles"
# Also of what the timeline shows beside the roles.
_TAKEN = frozenset({*BUILT_IN_ROLES, "driver", "publisher"})


@dataclass(frozen=True)
class ServiceSite:
    """What a worker of a service is built with, in its process.

    `name`: the worker's, which no other worker of the attempt has; `index`: its slot, from 0. `config`: the whole
    recipe; `settings`: the service's own section, or None. `host`: the address under which other workers of the run
    reach this one. `tell(text)` shows a line on the console; `addresses(role)` waits until a worker of a service is
    ready, and returns the addresses of those that are, by name."""

    name: str
    index: int
    config: Any
    settings: Any
    host: str
    tell: Callable[[str], Awaitable[None]]
    addresses: Callable[[str], Awaitable[dict[str, str]]]


class Service:
    """One worker of a service. Packages subclass it; all methods run on one event loop, which none may hold up."""

    async def start(self) -> str:
        """Get ready, within `run.startup_timeout_s`, and return the address that others reach it by; "" if nobody does.

        What it starts must be ready when this returns."""
        return ""

    async def run(self) -> None:
        """Serve until it is cancelled, because the run is over or the worker leaves.

        It counts as lost if it ends earlier, or raises."""
        await asyncio.Event().wait()

    async def drain(self) -> None:
        """Finish what it has. No new caller is told its address any more."""

    async def close(self) -> None:
        """Free what it holds; called once, also after a failure."""


@dataclass(frozen=True)
class ServiceRole:
    """A service that a package brings.

    build: `module:function`; (ServiceSite) -> Service, called in the worker's process.
    settings: the section that `roles.<name>.settings` is; a `Section`, whose every field has a `doc`.
    loading: what a worker does while it starts, for the console."""

    build: str
    settings: type[msgspec.Struct] | None = None
    loading: str = "starting"

    def __post_init__(self) -> None:
        if self.settings is not None and not self.settings.__struct_config__.forbid_unknown_fields:
            raise TypeError(
                f"service {self.build!r}: settings must be a subclass of omni_async.config.section.Section, which"
                f" refuses unknown keys, got {self.settings!r}"
            )

    def load(self) -> Callable[[ServiceSite], Service]:
        """Load the function that builds a worker, with all that it imports."""
        function: Callable[[ServiceSite], Service] = load_named(self.build)
        return function


@cache
def service_names() -> tuple[str, ...]:
    """Return the names of all installed services, sorted."""
    return registered_names(GROUP)


@cache
def find_service(name: str) -> ServiceRole:
    """Return the service registered as `name`.

    ValueError lists the installed ones, or says why its package, which is foreign code, gives none."""
    if name in _TAKEN:
        raise ValueError(f"roles: {name!r} is a role that every run has; a package's role needs another name")
    if not registered_names(GROUP):
        raise ValueError(f"roles: no installed package brings a role; install the one that brings {name!r}")
    return find_registered(name, GROUP, ServiceRole, "roles", also=", which the installed packages bring")
