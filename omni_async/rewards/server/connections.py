"""Bounds how many connections an HTTP server has, and distributes them over addresses.

When all are in use, a new connection closes a connection that sent no request yet, or else the longest idle connection
of the address with the most. A request in progress is never ended: the new connection is refused.

An idle connection, or a connection whose headers do not end, is closed after `IDLE_S`. aiohttp closes it through its
`keepalive_timeout`. Before the first request this module closes it, because aiohttp 3.13 would wait forever.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from collections.abc import Iterable
from typing import Any

from aiohttp import HttpVersion11, web

from omni_async.rewards.server.limits import client_of

IDLE_S = 30.0
_FRESH_S = 1.0  # a new connection is not idle: its request is on its way


class Connections:
    """The connections of a server, passed to `loop.create_server` in place of aiohttp's own.

    most: the most connections; fewer if the process may not open so many files. An address may have half of them idle,
    and seven of eight in all. idle_s: how long the first request may take to arrive.

    `send_continue` answers `Expect: 100-continue`, because aiohttp would answer before a request is checked."""

    def __init__(self, server: web.Server, most: int, idle_s: float = IDLE_S) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = most if files == resource.RLIM_INFINITY else max(1, min(most, files * 3 // 4))
        self._idle_s = idle_s
        self._server = server
        self._open: dict[Any, str] = {}  # handlers with their addresses, the longest idle first
        self._busy: set[Any] = set()
        self._silent: dict[Any, asyncio.TimerHandle] = {}  # without a request so far, the oldest first
        handle, make = server.request_handler, server.request_factory

        def received(message: Any, *rest: Any) -> web.BaseRequest:
            if "Expect" in message.headers:
                headers = message.headers.copy()
                headers.popall("Expect")
                message = message._replace(headers=headers)
            return make(message, *rest)

        server.request_factory = received

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
        """Pass a new connection to the server, or end it if there is no room."""
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
        self._silent.pop(handler, None)
        if handler.transport is not None:
            handler.transport.abort()

    def _make_room(self, address: str) -> bool:
        """Return whether there is room for a connection of an address, after ending another one if necessary."""
        if len(self._open) < self._most // 2:
            return True
        self._open = {one: its for one, its in self._open.items() if one.transport is not None}
        own = [one for one, its in self._open.items() if its == address]
        if len(own) >= self._most - self._most // 8:
            victim = self._least_used(own)
        elif len(own) >= self._most // 2 and (victim := self._unused(own)) is not None:
            pass
        elif len(self._open) < self._most:
            return True
        else:
            victim = self._least_used(self._open)
        if victim is None:
            return False
        self._end(victim)
        return True

    def _least_used(self, some: Iterable[Any]) -> Any | None:
        """Return which of these to end for a new connection; None if all are busy."""
        free = [one for one in some if one not in self._busy]
        silent = [one for one in free if one in self._silent]
        if (stale := self._unused(silent)) is not None:
            return stale
        if len(silent) <= self._most // 4 and len(silent) < len(free):  # beyond it, few are clients
            free = [one for one in free if one not in self._silent]
        else:
            free = silent
        counts = Counter(self._open[one] for one in free)
        return max(free, key=lambda one: counts[self._open[one]], default=None)

    def _unused(self, some: Iterable[Any]) -> Any | None:
        """Return the first of these that is neither busy nor new."""
        now, newest = asyncio.get_running_loop().time(), self._idle_s - _FRESH_S
        for one in some:
            timer = self._silent.get(one)
            if one not in self._busy and (timer is None or timer.when() - now <= newest):
                return one
        return None

    def _end(self, handler: Any) -> None:
        del self._open[handler]
        if (timer := self._silent.pop(handler, None)) is not None:
            timer.cancel()
        handler.transport.abort()


async def send_continue(request: web.BaseRequest) -> None:
    """Send "100 Continue" to a client that waits for it, before its body is read."""
    expected = [value.lower() for name, value in request.raw_headers if name.lower() == b"expect"]
    if expected == [b"100-continue"] and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0


class _Arrival(asyncio.Protocol):
    """A connection before the check whether there is room for it."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connections.begin(transport)


async def listen(runner: web.AppRunner, bound: Any, most: int, idle_s: float = IDLE_S) -> asyncio.Server:
    """Begin to accept the connections of a bound socket: `most` at once."""
    assert runner.server is not None
    factory = Connections(runner.server, most, idle_s)
    return await asyncio.get_running_loop().create_server(factory, sock=bound, backlog=128)
