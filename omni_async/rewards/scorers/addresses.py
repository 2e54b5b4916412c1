"""Provides scorers with the addresses of a recipe's servers, both existing servers and servers that the run starts.

Waits until a worker of the run is ready, unless other servers are available.
"""

from __future__ import annotations

import asyncio
from urllib.parse import quote

from omni_async.config.redact import resolve_references
from omni_async.config.reward import Reward, Server
from omni_async.rewards.base import Addresses, ScoreError

# How long to wait for the workers of the run if other servers are available.
_PATIENCE_S = 1.0


def urls_of(server: Server) -> dict[str, str]:
    """Return the addresses that the recipe gives for a server, by name, each with its token. Raises ValueError."""
    token = None
    if server.access is not None:
        where = f"reward.servers: access of {server.name!r}"
        token = resolve_references(server.access, where)
        if not (token.isascii() and token.isprintable()):
            raise ValueError(f"{where}: expected printable ASCII characters in {server.access}, no line end")
    return {
        # Quoted, because a token in base64 has characters that end the host of a URL.
        f"{server.name} at {url}": url if token is None else url.replace("://", f"://:{quote(token, safe='')}@", 1)
        for url in server.urls
    }


class KnownAddresses:
    """The addresses of a recipe's servers. `of_run` returns the addresses of servers that the run started, if any."""

    def __init__(self, reward: Reward, of_run: Addresses | None) -> None:
        self._servers = {server.name: server for server in reward.servers}
        self._of_run = of_run
        self._asked: dict[str, asyncio.Future[dict[str, str]]] = {}

    async def __call__(self, role: str) -> dict[str, str]:
        """Return the addresses of a role's workers, by name. ScoreError without a run if only a run starts the role."""
        server = self._servers.get(role)
        given = {} if server is None else urls_of(server)
        if self._of_run is None:
            if server is None:
                raise ScoreError(f"reward.servers has no {role!r}, and only a run starts roles")
            if not given:
                raise ScoreError(f"the servers of {role!r} are started by a run; without one, give their urls")
            return given
        if not given:
            return await self._of_run(role)
        if server is not None and not server.replicas:
            return given
        asked = self._asking(role, self._of_run)
        done, _ = await asyncio.wait({asked}, timeout=_PATIENCE_S)
        return given | asked.result() if done else given

    def _asking(self, role: str, of_run: Addresses) -> asyncio.Future[dict[str, str]]:
        """Return the pending request to the run, which all callers share, or a new one."""
        asked = self._asked.get(role)
        if asked is None:
            asked = self._asked[role] = asyncio.ensure_future(of_run(role))
            asked.add_done_callback(lambda done: self._answered(role, done))
        return asked

    def _answered(self, role: str, asked: asyncio.Future[dict[str, str]]) -> None:
        del self._asked[role]
        if not asked.cancelled():
            asked.exception()  # mark the error as retrieved: callers that waited have raised it, but there may be none
