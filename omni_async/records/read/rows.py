"""Keeps millions of rows in little memory: numpy records of fixed size, in chunks that are never copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Records = npt.NDArray[np.void]

_CHUNK = 2**15


class Rows:
    """An appendable table of rows of one numpy record type.

    `most`: about how many rows are kept, those with the latest `end` (None: all). `forgotten`: the number of others."""

    def __init__(self, dtype: np.dtype[np.void], most: int | None = None) -> None:
        self._dtype = dtype
        self._most = most
        self.clear()

    def clear(self) -> None:
        self._chunks: list[Records] = []
        self._bounds: list[tuple[float, float]] = []  # of full chunks
        self._in_last = 0
        self.forgotten = 0

    def __len__(self) -> int:
        return (len(self._chunks) - 1) * _CHUNK + self._in_last if self._chunks else 0

    def extend(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """Add rows, each a tuple in the order of the fields."""
        added = np.array(rows, self._dtype)
        while len(added):
            if not self._chunks or self._in_last == _CHUNK:
                self._forget_oldest()
                self._chunks.append(np.empty(_CHUNK, self._dtype))
                self._in_last = 0
            fits = added[: _CHUNK - self._in_last]
            self._chunks[-1][self._in_last : self._in_last + len(fits)] = fits
            self._in_last += len(fits)
            added = added[len(fits) :]

    def _forget_oldest(self) -> None:
        """Drop a chunk if there are as many as are kept, all of them full."""
        if self._most is not None and len(self) >= self._most > 0:
            oldest = min(range(len(self._chunks)), key=lambda number: self._bounds_of(number)[1])
            del self._chunks[oldest], self._bounds[oldest]
            self.forgotten += _CHUNK

    def _bounds_of(self, number: int) -> tuple[float, float]:
        """Return the earliest start and the latest end in a full chunk."""
        for chunk in self._chunks[len(self._bounds) : number + 1]:
            self._bounds.append((float(chunk["start"].min()), float(chunk["end"].max())))
        return self._bounds[number]

    def chunks(self) -> Iterator[Records]:
        """Yield the rows, thousands at a time, in the order they were added."""
        for number, chunk in enumerate(self._chunks, 1):
            yield chunk if number < len(self._chunks) else chunk[: self._in_last]

    def between(self, start: float, end: float) -> Iterator[Records]:
        """Yield the chunks with rows that may overlap a time interval. Rows must have a `start` and an `end`."""
        for number, chunk in enumerate(self.chunks()):
            if len(chunk) == _CHUNK:
                first, last = self._bounds_of(number)
                if first >= end or last <= start:
                    continue
            yield chunk

    def all(self) -> Records:
        """Return a copy of all rows."""
        return np.concatenate([*self.chunks()]) if self._chunks else np.empty(0, self._dtype)
