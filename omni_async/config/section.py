"""Provides the building blocks of the schema's sections."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta


def doc(text: str, why: str | None = None, *, most: float | None = None, **bounds: Any) -> Meta:
    """Return a field's documentation and bounds. This package's sections have the text below the field instead.

    Args:
        text: the description of the field.
        why: the reason of the bound `most`, or the allowed values of a pattern, in words.
        most: the largest value; messages name it only if a value exceeds it.
        bounds: other bounds, as msgspec's `Meta` takes them."""
    extra = {"why": why, "generous": most is not None}
    return Meta(description=text, extra=extra, **bounds | ({} if most is None else {"le": most}))


def most(bound: float, why: str | None = None, **bounds: Any) -> Meta:
    """Return the bounds of a value; `bound` and `why` are `most` and `why` of `doc`."""
    return Meta(le=bound, extra={"why": why, "generous": True}, **bounds)


# Every number is bounded above: an absurd value is a typing error. It is refused before it fills the memory or makes
# the run wait forever.
MOST_SECONDS = 1e6  # more than eleven days
MOST_UPDATES = 10_000_000
MOST_WORKERS = 10_000
MOST_STEPS = 1000
MOST_BYTES = 2**60
LARGEST = 1e12  # of coefficients and thresholds; a large threshold switches a rule off

SCHEDULERS = "the schedulers of diffusion models know 1000 timesteps"

Seconds = Annotated[float, most(MOST_SECONDS, gt=0)]
Pause = Annotated[float, most(MOST_SECONDS, ge=0)]  # seconds, too
Positive = Annotated[float, most(LARGEST, gt=0)]
Coefficient = Annotated[float, most(LARGEST, ge=0)]
Updates = Annotated[int, most(MOST_UPDATES, ge=1)]
NumSteps = Annotated[int, most(MOST_STEPS, SCHEDULERS, ge=1)]
Workers = Annotated[int, most(MOST_WORKERS, "each is a process", ge=1)]
Retries = Annotated[int, most(1000, ge=0)]
InMemory = Annotated[int, most(100_000, "they all lie in memory", ge=1)]
Alive = Annotated[int, most(10_000, "their samples are alive at once", ge=1)]

# No path, address or name contains control characters, or characters that a file name cannot contain.
_PLAIN = {"why": "1 to 4096 characters, no line ends or control codes", "generous": True}
Plain = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f]{1,4096}\Z", extra=_PLAIN)]

# No user, password or query: a token belongs into a header, which nothing logs.
_URL = {"why": "http:// or https://, a host, maybe a port and a path; no user, password or query"}
Url = Annotated[str, Meta(pattern=r"^https?://[\w.\-\[\]:]+(/[\w.~/-]*)?\Z", extra=_URL)]
Urls = Annotated[tuple[Url, ...], Meta(max_length=100)]

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

SizeText = Annotated[
    str,
    Meta(
        pattern=r"^[1-9][0-9]{0,5}(\.[0-9]{1,3})? ?[KMGT]iB\Z",
        extra={"why": "a number from 1 on and KiB, MiB, GiB or TiB, like '8GiB'"},
    ),
]


class Section(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Base of every section: unknown keys are errors, and values never change after loading."""


def bytes_of(text: str) -> int:
    """Return the bytes of a `SizeText`: 1610612736 for "1.5GiB"."""
    return int(float(text[:-3]) * _UNITS[text[-3:]])


def size_text(size: int) -> str:
    """Return a size as readable text: "1.5 GiB" for 1610612736."""
    unit = next((unit for unit in reversed(_UNITS) if size >= _UNITS[unit]), None)
    return f"{size} bytes" if unit is None else f"{size / _UNITS[unit]:.4g} {unit}"


class Resources(Section, kw_only=True, frozen=True):
    cpus: Annotated[float, most(10_000, "no machine has so many", gt=0)] = 1.0
    """CPUs of one actor; also its thread count."""
    gpus: Annotated[float, most(1000, "no machine has so many", ge=0)] = 0.0
    """Accelerators of one actor. Its process and children see no others; 0 hides all."""


RoleName = Annotated[
    str, Meta(pattern=r"^[a-z][a-z_]{0,39}\Z", extra={"why": "lower-case letters and '_', at most 40"})
]
