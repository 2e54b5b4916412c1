"""Starts the judge servers of a reward's scorers on this machine, without a run.

They load concurrently. A lost server is restarted; if the restart fails, it is left out. Waits at most `timeout_s` for
the servers to be ready, and waits for their end.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from omni_async.accelerator import showing, visible_devices, vllm_without_cpus
from omni_async.aio.waiting import cancel
from omni_async.config import ConfigError
from omni_async.config.hub import how_to_get
from omni_async.config.redact import one_line
from omni_async.plugins.services import ServiceSite
from omni_async.rewards.base import Addresses, ScoreError
from omni_async.roles.vllm_server import VllmServer

if TYPE_CHECKING:
    from omni_async.config.reward import Reward, Server

Tell = Callable[[str], Awaitable[None]]


@asynccontextmanager
async def local_servers(reward: Reward, timeout_s: float, tell: Tell) -> AsyncIterator[Addresses | None]:
    """Start the servers, yield their addresses as a run gives them to scorers, and end the servers.

    Yields None if no scorer needs a server to be started.

    Args:
        reward: its servers and its scorers.
        timeout_s: the longest time for loading.
        tell: the function for user messages.

    Raises:
        ConfigError: a server does not start, or needs an accelerator that does not exist."""
    asked = {scorer.params.get("server") for scorer in reward.scorers}
    wanted = [server for server in reward.servers if server.name in asked and server.replicas]
    if not wanted:
        yield None
        return
    servers = LocalServers(wanted, tell)
    try:
        await servers.start(timeout_s)
        yield servers.addresses
    finally:
        await servers.close()


class LocalServers:
    """The replicas of some servers. Their output goes to files in a temporary folder, which messages name."""

    def __init__(self, wanted: list[Server], tell: Tell) -> None:
        """Plan the replicas, with separate accelerators if they need any. ConfigError if that is impossible."""
        self._tell = tell
        # A fixed name could already belong to another user or command.
        self._logs = Path(tempfile.mkdtemp(prefix="omni-async-servers-"))
        self._replicas: dict[str, tuple[Server, dict[str, str]]] = {}
        self._running: dict[str, VllmServer] = {}
        self._ready: dict[str, dict[str, str]] = {server.name: {} for server in wanted}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Condition()
        kind, seen = visible_devices() if any(server.resources.gpus for server in wanted) else ("", [])
        free = iter(seen)
        for server in wanted:
            if not Path(server.model).exists():
                raise ConfigError(f"reward.servers: {how_to_get(Path(server.model))}")
            gpus = math.ceil(server.resources.gpus)
            if gpus == 0 and (installed := vllm_without_cpus()) is not None:
                raise ConfigError(
                    f"reward.servers: resources.gpus of {server.name!r}: 0 is the CPU, and the installed vLLM"
                    f" {installed} runs on accelerators alone; set it to 1"
                )
            for index in range(server.replicas):
                mine = [*islice(free, gpus)]
                if len(mine) < gpus:
                    needed = sum(math.ceil(one.resources.gpus) * one.replicas for one in wanted)
                    raise ConfigError(
                        f"reward.servers: resources.gpus of {server.name!r}: the servers need {needed} accelerators,"
                        f" torch sees {len(seen)} here; lower resources.gpus (0 is the CPU) or replicas"
                    )
                self._replicas[f"{server.name}-{index}"] = server, showing({kind: mine})

    async def start(self, timeout_s: float) -> None:
        """Return when all are ready. ConfigError if one ends before that, or is not ready in time."""
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as loading:
                for name in self._replicas:
                    loading.create_task(self._start(name))
        except TimeoutError:
            late = sorted(self._replicas.keys() - {one for ready in self._ready.values() for one in ready})
            raise ConfigError(f"reward.servers: {', '.join(late)} not ready within {timeout_s:g} s") from None
        except ExceptionGroup as errors:
            raise ConfigError(f"reward.servers: {one_line(str(errors.exceptions[0]), 700)}") from None
        for name in self._replicas:
            self._watching[name] = asyncio.create_task(self._watch(name))

    async def _start(self, name: str) -> None:
        server, devices = self._replicas[name]
        site = ServiceSite(name, 0, None, None, "127.0.0.1", self._tell, self.addresses)
        one = self._running[name] = VllmServer(site, server, self._logs, devices)
        address = await one.start()
        async with self._changed:
            self._ready[server.name][name] = address
            self._changed.notify_all()

    async def _watch(self, name: str) -> None:
        """Restart a server whenever it is lost, until a restart fails."""
        server, _ = self._replicas[name]
        while True:
            try:
                await self._running[name].run()
            except RuntimeError as error:
                await self._tell(f"{name} is started again: {error}")
            self._ready[server.name].pop(name, None)
            await self._running[name].close()
            try:
                await self._start(name)
            except (RuntimeError, OSError) as error:
                await self._tell(f"{name} does not come back: {error}")
                break
        async with self._changed:
            del self._watching[name]
            self._changed.notify_all()

    async def addresses(self, role: str) -> dict[str, str]:
        """Return a server's ready replicas, name -> address; wait for the first one. ScoreError if none is left."""
        ready = self._ready.get(role)
        if ready is None:
            raise ScoreError(f"{role!r} is started by a run; without one, give its urls")
        async with self._changed:
            while not ready:
                if not any(self._replicas[name][0].name == role for name in self._watching):
                    raise ScoreError(f"no server of {role!r} is left")
                await self._changed.wait()
            return dict(ready)

    async def close(self) -> None:
        """End the servers."""
        await cancel(list(self._watching.values()))
        await asyncio.gather(*(one.close() for one in self._running.values()))
