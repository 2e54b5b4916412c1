"""Keeps the most recently used values of an engine, up to a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The most recently used values, for one thread.

    Values of at most `most_bytes` in all are kept, or one value if it is larger. `size` returns a value's bytes."""

    def __init__(self, most_bytes: int, size: Callable[[V], int]) -> None:
        self.most_bytes = most_bytes
        self._size = size
        self._values: OrderedDict[K, V] = OrderedDict()
        self._bytes = 0

    def get(self, key: K) -> V | None:
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: K, value: V) -> None:
        """Add or replace a value, and drop the least recently used values beyond `most_bytes`."""
        if key in self._values:
            self._bytes -= self._size(self._values.pop(key))
        self._values[key] = value
        self._bytes += self._size(value)
        while self._bytes > self.most_bytes and len(self._values) > 1:
            _, oldest = self._values.popitem(last=False)
            self._bytes -= self._size(oldest)

    def clear(self) -> None:
        self._values.clear()
        self._bytes = 0
