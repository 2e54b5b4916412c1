"""Runs the checks of a comparison, and shows the results as a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec


class Found(NamedTuple):
    """A check's measured value, its upper bound (None: the value is only reported), and a note."""

    value: float
    bound: float | None
    note: str = ""


class Row(msgspec.Struct, frozen=True):
    """A line of the table. `value` is None if the check could not run; `note` then gives the reason.

    `impossible`: this machine cannot run it, which is no failure."""

    subject: str
    check: str
    value: float | None
    bound: float | None
    note: str = ""
    impossible: bool = False

    @property
    def passed(self) -> bool:
        return self.impossible or (self.value is not None and (self.bound is None or self.value <= self.bound))


def measure(subject: str, check: str, made: Callable[[], Found]) -> Row:
    """Run a check. Its exception becomes a row too, because later checks may reveal more."""
    try:
        found = made()
    except Exception as error:  # noqa: BLE001 (a family is foreign code)
        return failed(subject, check, error)
    return Row(subject, check, float(found.value), found.bound, found.note)


def failed(subject: str, check: str, error: Exception) -> Row:
    """Make the row of a check that raised."""
    return Row(subject, check, None, None, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


# Columns have the width of their known contents, so that a line can be shown as soon as it is complete.
_WIDTHS = (6, 9, 28, 8, 8)
HEADER = ("", "of", "check", "measured", "allowed", "")


def line(cells: tuple[str, ...]) -> str:
    """Return a line of the table, as markdown aligned for reading as plain text."""
    state, subject, check, value, bound = (
        cell.rjust(width) if number > 2 else cell.ljust(width)
        for number, (cell, width) in enumerate(zip(cells[:-1], _WIDTHS, strict=True))
    )
    return f"| {state} | {subject} | {check} | {value} | {bound} | {cells[-1]} |"


def rule() -> str:
    """Return the line below the header."""
    return f"|{'|'.join('-' * (width + 2) for width in _WIDTHS)}|---|"


def cells(row: Row) -> tuple[str, ...]:
    """Return a row's cells; a check without a bound is only reported."""
    value = "-" if row.value is None else _number(row.value)
    bound = "" if row.bound is None else _number(row.bound)
    state = "n/a" if row.impossible else "ok" if row.passed else "FAILED"
    return state, row.subject, row.check, value, bound, row.note


def _number(value: float) -> str:
    return f"{value:g}" if value in (0, float("inf")) or value >= 1 else f"{value:.1e}"
