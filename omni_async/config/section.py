"""Provides the parts that every section of the schema is made of."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta


def doc(text: str, why: str | None = None, *, most: float | None = None, **bounds: Any) -> Meta:
    """Return a field's documentation and bounds.

    `most` is an upper bound that messages name only if a value is above it. `why` gives the reason of that bound, or
    the allowed values of a pattern, in words."""
    extra = {"why": why, "generous": most is not None}
    return Meta(description=text, extra=extra, **bounds | ({} if most is None else {"le": most}))


def most(bound: float, why: str | None = None, **bounds: Any) -> Meta:
    """Return the bounds of a value inside a field, with `bound` as the `most` of `doc` and its reason."""
    return Meta(le=bound, extra={"why": why, "generous": True}, **bounds)


# Every number is bounded above: an absurd value is a typing error, and is refused before it fills the memory or waits
# for ever.
MOST_SECONDS = 1e6  # more than eleven days
MOST_UPDATES = 10_000_000
MOST_WORKERS = 10_000
MOST_STEPS = 1000
MOST_BYTES = 2**60
LARGEST = 1e12  # of coefficients and thresholds, where a large one switches something off

SCHEDULERS = "the schedulers of diffusion models know 1000 timesteps"

Seconds = Annotated[float, most(MOST_SECONDS, gt=0)]
Pause = Annotated[float, most(MOST_SECONDS, ge=0)]  # seconds, too
Positive = Annotated[float, most(LARGEST, gt=0)]
Coefficient = Annotated[float, most(LARGEST, ge=0)]
Updates = Annotated[int, most(MOST_UPDATES, ge=1)]
NumSteps = Annotated[int, most(MOST_STEPS, SCHEDULERS, ge=1)]
Workers = Annotated[int, most(MOST_WORKERS, "each is a process", ge=1)]
Retries = Annotated[int, most(1000, ge=0)]

# No path, address or name contains characters that a terminal obeys or a file name cannot hold.
_PLAIN = {"why": "1 to 4096 characters, no line ends or control codes", "generous": True}
Plain = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f]{1,4096}\Z", extra=_PLAIN)]


class Section(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Base of every section: unknown keys are errors, values never change after loading."""
