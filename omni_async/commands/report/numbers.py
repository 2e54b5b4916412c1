"""Computes means with their uncertainty for the page, and formats numbers for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from scipy.special import stdtrit


class Estimate(NamedTuple):
    """A mean, and the half width of its 95 % interval; None for a single value."""

    mean: float
    half: float | None


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return the mean of independent values with its 95 % interval (Student's t); None without values."""
    count = len(values)
    if not count:
        return None
    mean = sum(values) / count
    if count == 1:
        return Estimate(mean, None)
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(mean, float(stdtrit(count - 1, 0.975)) * math.sqrt(variance / count))


def difference(before: Estimate, after: Estimate) -> Estimate:
    """Return after - before with its 95 % interval, for independent estimates."""
    halves = [one.half for one in (before, after)]
    half = None if None in halves else math.hypot(*(half or 0.0 for half in halves))
    return Estimate(after.mean - before.mean, half)


def number(value: float | None, digits: int = 3) -> str:
    """Format a number with `digits` significant digits, and an exponent only for extreme values."""
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 1e-4 <= abs(value) < 1e7:
        places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
        return f"{value:,.{places}f}"
    return f"{value:.{digits - 1}e}"


def with_interval(found: Estimate) -> str:
    """Format `0.251 ± 0.041`."""
    if found.half is None or not math.isfinite(found.half):
        return number(found.mean)
    places = max(0, 1 - math.floor(math.log10(found.half))) if found.half > 0 else 3
    places = min(places, 6)
    return f"{found.mean:z.{places}f} ± {found.half:.{places}f}"


def signed(found: Estimate) -> str:
    """Format `+0.251 ± 0.041`."""
    shown = with_interval(found)
    return shown if shown.startswith("-") else f"+{shown}"


def seconds(value: float | None) -> str:
    """Format a duration for people."""
    if value is None:
        return "-"
    if value < 120:
        return f"{number(value)} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def counted(count: int, what: str) -> str:
    """Format `1 update`, `2 updates`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"
