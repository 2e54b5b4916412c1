"""Limits how often one client may ask, and how much of a server it may take."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter, OrderedDict, deque

# Addresses that are remembered: those that have not asked for longest are forgotten, and have a full burst again.
_MOST_ADDRESSES = 4096


def client_of(address: str | None) -> str:
    """Return whom an address belongs to: of IPv6, all that share its first 64 bits, which one machine may have."""
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
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens left, and when that was

    def wait_s(self, address: str, now: float) -> float:
        """Take a token and return 0, or return the seconds until there is one.

        Args:
            address: the client's.
            now: seconds of a clock that never goes back."""
        left = self._left(address, now)
        waits = left < 1
        self._buckets[address] = (left if waits else left - 1, now)
        self._buckets.move_to_end(address)
        if len(self._buckets) > _MOST_ADDRESSES:
            self._buckets.popitem(last=False)
        return (1 - left) / self._per_s if waits else 0.0

    def is_spent(self, address: str, now: float) -> bool:
        """Return whether there is no token; takes none."""
        return self._left(address, now) < 1

    def _left(self, address: str, now: float) -> float:
        left, at = self._buckets.get(address, (float(self._burst), now))
        return min(float(self._burst), left + (now - at) * self._per_s)


class Room:
    """Bytes that clients hold at once: `most` of them, and one body more.

    A client that holds some gets no more than half. Of those that wait, the one that holds least is first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = Counter[str]()
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}

    @property
    def held(self) -> int:
        return self._held.total()

    def waiting(self, client: str) -> int:
        """Return how many bodies of a client wait."""
        return len(self._waiting.get(client, ()))

    async def take(self, client: str, nbytes: int) -> None:
        """Wait until the client may hold so many bytes more; from then on it does, until `give_back`."""
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        mine = (nbytes, admitted)
        self._waiting.setdefault(client, deque()).append(mine)
        self._admit()
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():
                self.give_back(client, nbytes)
            else:
                self._leave(client, mine)
                self._admit()
            raise

    def give_back(self, client: str, nbytes: int) -> None:
        """Take note that a client holds so many bytes less."""
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
            nbytes, admitted = first = self._waiting[client][0]
            self._leave(client, first)
            if not admitted.done():
                self._held[client] += nbytes
                admitted.set_result(None)

    def _fits(self, client: str) -> bool:
        held = self._held[client]
        return held == 0 or held + self._waiting[client][0][0] <= self._most // 2

    def _leave(self, client: str, one: tuple[int, asyncio.Future[None]]) -> None:
        self._waiting[client].remove(one)
        if not self._waiting[client]:
            del self._waiting[client]
