"""Finds services, roles from other packages: a server, a judge, a cache. Imports no torch and no Ray.

A package registers a `ServiceRole` in the entry-point group `omni_async.roles`. A recipe that names it under `roles`
gets workers of it, each in a separate process. The run replaces a lost worker and continues.
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
# Includes the timeline's actors that are not roles.
_TAKEN = frozenset({*BUILT_IN_ROLES, "driver", "publisher"})


@dataclass(frozen=True)
class ServiceSite:
    """The site of a service's worker, in its process.

    name: the worker's name, unique in the attempt.
    index: its slot, from 0.
    config: the whole recipe.
    settings: the service's own section, or None.
    host: the address under which other workers of the run reach this one.
    tell: `tell(text)` shows a line on the console.
    addresses: `addresses(role)` waits until a worker of a service is ready, and returns the addresses of all ready
        workers, by name."""

    name: str
    index: int
    config: Any
    settings: Any
    host: str
    tell: Callable[[str], Awaitable[None]]
    addresses: Callable[[str], Awaitable[dict[str, str]]]


class Service:
    """One worker of a service. Packages subclass it; all methods run on one event loop and must not block it."""

    async def start(self) -> str:
        """Get ready within `run.startup_timeout_s`; return the address for other workers, or "" if none needs it.

        Everything that it starts must be ready when this returns."""
        return ""

    async def run(self) -> None:
        """Serve until cancelled, at the end of the run or when the worker leaves.

        The worker counts as lost if this returns earlier or raises."""
        await asyncio.Event().wait()

    async def drain(self) -> None:
        """Finish the work in progress. New callers no longer get the worker's address."""

    async def close(self) -> None:
        """Free all resources; called once, also after a failure."""


@dataclass(frozen=True)
class ServiceRole:
    """A service of a package.

    build: `module:function`; (ServiceSite) -> Service, called in the worker's process.
    settings: the section for `roles.<name>.settings`; a `Section` whose fields all have a `doc`.
    loading: the worker's activity while it starts, for the console."""

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
        """Load the function that builds a worker, with all its imports."""
        function: Callable[[ServiceSite], Service] = load_named(self.build)
        return function


@cache
def service_names() -> tuple[str, ...]:
    """Return the names of all installed services, sorted."""
    return registered_names(GROUP)


@cache
def find_service(name: str) -> ServiceRole:
    """Return the service registered as `name`.

    Raises ValueError that lists the installed services, or explains why the package, which is foreign code, failed."""
    if name in _TAKEN:
        raise ValueError(f"roles: {name!r} is a role that every run has; a package's role needs another name")
    if not registered_names(GROUP):
        raise ValueError(f"roles: no installed package brings a role; install the package that brings {name!r}")
    return find_registered(name, GROUP, ServiceRole, "roles", also=", which the installed packages bring")
