"""Defines bounded numbers and texts: msgspec refuses a struct from a file that exceeds them."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

# The squares of larger numbers, summed, may overflow.
LARGEST = 1e100
# Beyond it, a float cannot resolve microseconds, and calendars have no year.
FARTHEST_S = 1e11
MOST = 2**53
LONGEST = 100_000
Value = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
Amount = Annotated[float, Meta(ge=0, le=LARGEST)]
Seconds = Annotated[float, Meta(ge=0, le=FARTHEST_S)]
Time = Annotated[float, Meta(ge=-FARTHEST_S, le=FARTHEST_S)]
Count = Annotated[int, Meta(ge=0, lt=MOST)]
Text = Annotated[str, Meta(max_length=LONGEST)]
Number = Annotated[int, Meta(ge=0, lt=2**31)]  # of a group, a prompt or a version: 32 bits in tables


def finite(value: Any) -> float | None:
    """Return a number in range; None for anything else, booleans included."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST:
        return None
    return float(value)


def count(value: Any) -> int | None:
    """Return a non-negative integer below 2**53; None for anything else, booleans included."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST else None
