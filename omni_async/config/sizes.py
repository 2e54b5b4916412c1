"""Reads sizes in bytes that are given as texts."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

SizeText = Annotated[
    str,
    Meta(
        pattern=r"^[1-9][0-9]{0,5}(\.[0-9]{1,3})? ?[KMGT]iB\Z",
        extra={"why": "a number from 1 on and KiB, MiB, GiB or TiB, like '8GiB'"},
    ),
]


def bytes_of(text: str) -> int:
    """Return the bytes of a `SizeText`: 1610612736 for "1.5GiB"."""
    return int(float(text[:-3]) * _UNITS[text[-3:]])


def size_text(size: int) -> str:
    """Return a size for a person: "1.5 GiB" for 1610612736."""
    unit = next((unit for unit in reversed(_UNITS) if size >= _UNITS[unit]), None)
    return f"{size} bytes" if unit is None else f"{size / _UNITS[unit]:.4g} {unit}"
