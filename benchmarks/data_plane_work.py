"""Implements the work of producer and trainer in every arm of the data-plane benchmark.

The producer sends numbered payloads; the trainer reads every page of each once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Payload = NDArray[np.uint8]

GROUP = 8  # samples that the trainer fetches at a time
CONCURRENT_PUTS = 32

_MOST_IN_FLIGHT = 128
_BYTES_IN_FLIGHT = 2**29
_PAGE = 4096
_STAMP = 8  # bytes that hold a sample's number


def in_flight(nbytes: int) -> int:
    """Return the number of samples between producer and trainer at a time, in every arm.

    It is as many as fit into a fixed memory, between one and four times CONCURRENT_PUTS; a power of two, so that it
    divides every number of samples."""
    fitting = max(1, _BYTES_IN_FLIGHT // nbytes)
    return max(CONCURRENT_PUTS, min(_MOST_IN_FLIGHT, 1 << (fitting.bit_length() - 1)))


class Source:
    """Payloads of `nbytes` bytes, in reused memory for `count` payloads; a payload must be copied before its reuse."""

    def __init__(self, nbytes: int, count: int | None = None) -> None:
        if nbytes < _STAMP:
            raise ValueError(f"a payload has at least {_STAMP} bytes, got {nbytes}")
        page = np.random.default_rng(0).integers(0, 256, _PAGE, dtype=np.uint8)
        self._pool = np.resize(page, (count or in_flight(nbytes), nbytes))

    def payload(self, number: int) -> Payload:
        return self.batch(number, 1)[0]

    def batch(self, first: int, count: int) -> Payload:
        """Return payloads from number `first`, (count, nbytes); the pool and `first` are multiples of `count`."""
        start = first % len(self._pool)
        batch = self._pool[start : start + count]
        for row, payload in enumerate(batch):
            payload[:_STAMP].view(np.int64)[0] = first + row
        return batch


class Tally:
    """A count of the samples 0, 1, ..., `samples` - 1, expected in any order, each once and complete."""

    def __init__(self, nbytes: int, samples: int) -> None:
        self._nbytes = nbytes
        self._samples = samples
        self._numbers: set[int] = set()
        self._sum = 0

    def take(self, payload: Any) -> None:
        """Touch every page. Raises RuntimeError if the payload is incomplete or a duplicate."""
        array = np.asarray(payload)
        if array.nbytes != self._nbytes:
            raise RuntimeError(f"a payload of {array.nbytes} bytes arrived, expected {self._nbytes}")
        number = int(array[:_STAMP].view(np.int64)[0])
        if number in self._numbers or not 0 <= number < self._samples:
            raise RuntimeError(f"sample {number} of {self._samples} arrived twice, or was never sent")
        self._numbers.add(number)
        self._sum += int(array[::_PAGE].sum())

    @property
    def left(self) -> int:
        return self._samples - len(self._numbers)
