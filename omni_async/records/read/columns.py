"""Keeps the numbers of metrics lines by name: a column each, with NaN for lines without it."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from omni_async.types import finite

# Maximum number of metric names; no run writes a file with more.
_MOST_COLUMNS = 5000
_MOST_NUMBERS = 10_000_000


class Columns:
    """Lines of numbers, in the order they came."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._columns: dict[str, array[float]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def add(self, line: Mapping[str, Any]) -> bool:
        """Add a line; return False if there is no room for it.

        A resumed run makes updates again: a repeated `update` replaces its earlier line and all lines after that.
        A null becomes NaN; a mapping gives columns `name/key`; other values that are not numbers are left out."""
        if (self._length + 1) * max(100, len(self._columns)) > _MOST_NUMBERS:
            return False
        self._forget_from(finite(line.get("update")))
        for name, value in line.items():
            if isinstance(value, Mapping):
                for key, one in value.items():
                    self._put(f"{name}/{key}", one)
            else:
                self._put(name, value)
        self._length += 1
        for column in self._columns.values():
            if len(column) < self._length:
                column.append(math.nan)
        return True

    def _forget_from(self, update: float | None) -> None:
        numbers = self._columns.get("update")
        while numbers and update is not None and numbers[-1] >= update:
            for column in self._columns.values():
                column.pop()
            self._length -= 1

    def _put(self, name: str, value: Any) -> None:
        number = math.nan if value is None else finite(value)
        if number is None:
            return
        column = self._columns.get(name)
        if column is None:
            if len(self._columns) >= _MOST_COLUMNS:
                return
            column = self._columns[name] = array("d", [math.nan]) * self._length
        if len(column) == self._length:  # a line may contain a name twice: as a mapping's key, and in full
            column.append(number)

    def column(self, name: str, newest: int | None = None) -> npt.NDArray[np.float64]:
        """Return a copy of a column, or of its newest values; all NaN if the column is missing."""
        first = 0 if newest is None else max(0, self._length - newest)
        if name not in self._columns:
            return np.full(self._length - first, math.nan)
        return np.array(self._columns[name][first:], np.float64)

    def line(self, position: int) -> dict[str, float]:
        """Return the finite numbers of a line."""
        found = {name: column[position] for name, column in self._columns.items()}
        return {name: value for name, value in found.items() if math.isfinite(value)}
