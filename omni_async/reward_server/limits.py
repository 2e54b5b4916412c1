"""Limits how often one client may ask."""

from __future__ import annotations

from collections import OrderedDict

# Addresses that are remembered: those that have not asked for longest are forgotten, and have a full burst again.
_MOST_ADDRESSES = 4096


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
