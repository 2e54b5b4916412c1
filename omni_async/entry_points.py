"""Loads what other packages register in entry points. They are foreign code, and may break in any way."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import TypeVar

T = TypeVar("T")


def load_registered(point: EntryPoint, cls: type[T], key: str) -> T:
    """Return what the entry point leads to.

    ValueError, one line that begins with `key`, if it cannot be imported or is no `cls`.
    """
    where = f"{key}: {point.name!r} is registered as {point.value!r}, which"
    try:
        found = point.load()
    except (Exception, SystemExit) as error:  # noqa: BLE001 (KeyboardInterrupt stays the user's)
        raise ValueError(f"{where} cannot be imported: {type(error).__name__}: {error}") from None
    if not isinstance(found, cls):
        raise ValueError(f"{where} is a {type(found).__name__}, not a {cls.__name__}")
    return found
