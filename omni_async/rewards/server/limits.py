"""Limits the request rate of a client, and its share of a server's memory; refuses the rest."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Callable

# Stored addresses. The address with the oldest request is dropped, and then has a full burst again.
_MOST_ADDRESSES = 4096


class Refused(Exception):
    """A request is refused with `status` and one line; `retry_s`: when the client may retry."""

    def __init__(self, status: int, why: str, retry_s: float | None = None) -> None:
        super().__init__(why)
        self.status = status
        self.retry_s = retry_s


def client_of(address: str | None) -> str:
    """Return the client of an address: for IPv6 its /64 network, because one machine may have all of it."""
    try:
        found = ipaddress.ip_address((address or "").partition("%")[0])
    except ValueError:
        return address or ""
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    return str(found.ipv4_mapped or ipaddress.IPv6Network((found, 64), strict=False))


class RateLimit:
    """A token bucket for each address: `per_s` requests a second on average, `burst` at once after a pause."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s = per_s
        self._burst = burst
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens left, and at what time

    def wait_s(self, address: str, now: float) -> float:
        """Take a token and return 0, or return the seconds until there is one.

        Args:
            address: the client's.
            now: seconds of a monotonic clock."""
        left, at = self._buckets.get(address, (float(self._burst), now))
        left = min(float(self._burst), left + (now - at) * self._per_s)
        waits = left < 1
        self._buckets[address] = (left if waits else left - 1, now)
        self._buckets.move_to_end(address)
        if len(self._buckets) > _MOST_ADDRESSES:
            self._buckets.popitem(last=False)
        return (1 - left) / self._per_s if waits else 0.0


class Room:
    """Bytes that clients hold at once: at most `most`, plus one body.

    A client that holds some gets no more than half. The client that holds least is first, with its smallest body.
    `began_to_wait` is called when a body has to wait."""

    def __init__(self, most: int) -> None:
        self.began_to_wait: Callable[[], None] = lambda: None
        self._most = most
        self._held = Counter[str]()
        self._waiting: dict[str, list[tuple[int, asyncio.Future[None]]]] = {}

    @property
    def held(self) -> int:
        return self._held.total()

    def waiting(self, client: str) -> int:
        """Return the number of waiting bodies of a client."""
        return len(self._waiting.get(client, ()))

    def blocks(self, client: str) -> bool:
        """Return whether a body waits because of the bytes that this client holds."""
        return client in self._waiting or (bool(self._waiting) and self.held >= self._most)

    def fits_more(self, client: str, nbytes: int) -> bool:
        """Return whether a client may hold so many more bytes at once; always true if no other client holds any."""
        return self.held + nbytes <= self._most or self._held.keys() <= {client}

    async def take(self, client: str, nbytes: int) -> None:
        """Wait until the client may hold so many more bytes, and hold them until `give_back`."""
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        mine = (nbytes, admitted)
        self._waiting.setdefault(client, []).append(mine)
        self._admit()
        if not admitted.done():
            self.began_to_wait()
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():
                self.give_back(client, nbytes)
            else:
                self._leave(client, mine)
                self._admit()
            raise

    def charge(self, client: str, nbytes: int) -> None:
        """Record that a client holds so many more bytes, without waiting."""
        self._held[client] += nbytes

    def give_back(self, client: str, nbytes: int) -> None:
        """Record that a client holds so many fewer bytes."""
        self._held[client] -= nbytes
        if self._held[client] <= 0:
            del self._held[client]
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.held < self._most:
            fitting = [client for client in self._waiting if self._fits(client)]
            if not fitting:
                return
            client = min(fitting, key=lambda one: self._held[one])
            nbytes, admitted = first = self._smallest(client)
            self._leave(client, first)
            if not admitted.done():
                self._held[client] += nbytes
                admitted.set_result(None)

    def _fits(self, client: str) -> bool:
        held = self._held[client]
        return held == 0 or held + self._smallest(client)[0] <= self._most // 2

    def _smallest(self, client: str) -> tuple[int, asyncio.Future[None]]:
        return min(self._waiting[client], key=lambda one: one[0])

    def _leave(self, client: str, one: tuple[int, asyncio.Future[None]]) -> None:
        self._waiting[client].remove(one)
        if not self._waiting[client]:
            del self._waiting[client]
