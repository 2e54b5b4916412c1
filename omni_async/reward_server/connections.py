"""Bounds how many connections an HTTP server has, and deals them out to addresses.

Where all are taken, the address that has the most gives one up for a new connection of another: the longest idle one,
or else its oldest. An idle connection, and one whose headers do not end, is closed after `IDLE_S`: by aiohttp, which is
given that as its `keepalive_timeout`, and before the first request here, because aiohttp 3.13 waits for that for ever.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from typing import Any

from aiohttp import web

from omni_async.reward_server.limits import client_of

IDLE_S = 30.0


class Connections:
    """The connections of a server, which is given to `loop.create_server` in place of aiohttp's own.

    most: how many there may be; fewer where the process may not open so many files. An address may have half of them
    idle. idle_s: how long the first request may take to arrive."""

    def __init__(self, server: web.Server, most: int, idle_s: float = IDLE_S) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = most if files == resource.RLIM_INFINITY else max(1, min(most, files * 3 // 4))
        self._idle_s = idle_s
        self._server = server
        self._open: dict[Any, str] = {}  # handlers with their addresses, the one that has been idle for longest first
        self._busy: set[Any] = set()
        self._silent: dict[Any, asyncio.TimerHandle] = {}  # those that have sent no request yet
        handle = server.request_handler

        async def counted(request: web.BaseRequest) -> web.StreamResponse:
            handler = request.protocol
            self._busy.add(handler)
            if (timer := self._silent.pop(handler, None)) is not None:
                timer.cancel()
            try:
                return await handle(request)
            finally:
                self._busy.discard(handler)
                if (address := self._open.pop(handler, None)) is not None:
                    self._open[handler] = address

        server.request_handler = counted

    def __call__(self) -> asyncio.Protocol:
        return _Arrival(self)

    def begin(self, transport: Any) -> None:
        """Hand a new connection to the server, or end it if there is no room."""
        peer = transport.get_extra_info("peername")
        address = client_of(str(peer[0]) if peer else None)
        if not self._make_room(address):
            transport.abort()
            return
        handler = self._server()
        self._open[handler] = address
        self._silent[handler] = asyncio.get_running_loop().call_later(self._idle_s, self._give_up, handler)
        transport.set_protocol(handler)
        handler.connection_made(transport)

    def _give_up(self, handler: Any) -> None:
        """End a connection that has sent no request in time."""
        del self._silent[handler]
        if handler.transport is not None:
            handler.transport.abort()

    def _make_room(self, address: str) -> bool:
        """Return whether there is room for a connection of an address, after another has been ended if need be."""
        if len(self._open) < self._most // 2:
            return True
        self._open = {one: its for one, its in self._open.items() if one.transport is not None}
        counts = Counter(self._open.values())
        is_full = len(self._open) >= self._most
        if not is_full and counts[address] < self._most // 2:
            return True
        giver = max(counts, key=lambda one: counts[one]) if is_full else address
        own = [one for one, its in self._open.items() if its == giver]
        victim = next((one for one in own if one not in self._busy), None)
        if victim is None and is_full and counts[giver] > counts[address] + 1:
            victim = own[0]
        if victim is None:
            return not is_full
        del self._open[victim]
        victim.transport.abort()
        return True


class _Arrival(asyncio.Protocol):
    """A connection until it is known whether there is room for it."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connections.begin(transport)


async def listen(runner: web.AppRunner, bound: Any, most: int, idle_s: float = IDLE_S) -> asyncio.Server:
    """Begin to accept the connections of a bound socket: `most` at once."""
    assert runner.server is not None
    factory = Connections(runner.server, most, idle_s)
    return await asyncio.get_running_loop().create_server(factory, sock=bound, backlog=128)
