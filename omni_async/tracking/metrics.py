"""Gathers numbers between two updates, each with the reduction that its recorder declared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Reduction = Literal["mean", "sum", "min", "max", "last"]


@dataclass
class _Cell:
    reduction: Reduction
    value: float
    weight: float

    def include(self, value: float, weight: float) -> None:
        """Add a number. For `mean`, `value` is the weighted sum so far."""
        match self.reduction:
            case "mean" | "sum":
                self.value += value
            case "min":
                self.value = min(self.value, value)
            case "max":
                self.value = max(self.value, value)
            case "last":
                self.value = value
        self.weight += weight

    @property
    def result(self) -> float:
        return self.value / self.weight if self.reduction == "mean" else self.value


class Metrics:
    def __init__(self) -> None:
        self._cells: dict[str, _Cell] = {}

    def record(self, name: str, value: float, reduction: Reduction, weight: float = 1.0) -> None:
        """Add a number.

        `weight` (of a mean: the count of numbers it averages) must be positive; a name keeps its first reduction."""
        if weight <= 0:
            raise ValueError(f"metric {name!r}: weight must be positive, got {weight}")
        self._include(name, value * weight if reduction == "mean" else value, reduction, weight)

    def merge(self, other: Metrics) -> None:
        """Add everything `other` holds, as if it had been recorded here, last."""
        for name, cell in other._cells.items():
            self._include(name, cell.value, cell.reduction, cell.weight)

    def flush(self) -> dict[str, float]:
        """Return the reduced numbers since the last flush, by name, and clear them."""
        reduced = {name: cell.result for name, cell in sorted(self._cells.items())}
        self._cells.clear()
        return reduced

    def _include(self, name: str, value: float, reduction: Reduction, weight: float) -> None:
        cell = self._cells.get(name)
        if cell is None:
            self._cells[name] = _Cell(reduction, value, weight)
        elif cell.reduction != reduction:
            raise ValueError(f"metric {name!r} is reduced by {cell.reduction}, cannot record it as {reduction}")
        else:
            cell.include(value, weight)


def histogram(values: Iterable[int]) -> dict[int, int]:
    """Count how often each value (a staleness, say) occurs, in ascending order."""
    return dict(sorted(Counter(values).items()))
