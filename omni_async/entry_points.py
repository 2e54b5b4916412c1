"""Loads what other packages register in entry points, and what a table names as `module:name`.

Other packages are foreign code and may break in any way.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

T = TypeVar("T")


def load_registered(point: EntryPoint, cls: type[T], key: str) -> T:
    """Return what the entry point leads to.

    ValueError, one line that begins with `key`, if it cannot be imported or is no `cls`."""
    where = f"{key}: {point.name!r} is registered as {point.value!r}, which"
    try:
        found = point.load()
    except (Exception, SystemExit) as error:  # noqa: BLE001 (KeyboardInterrupt stays the user's)
        raise ValueError(f"{where} cannot be imported: {type(error).__name__}: {error}") from None
    if not isinstance(found, cls):
        raise ValueError(f"{where} is a {type(found).__name__}, not a {cls.__name__}")
    return found


def load_named(name: str) -> Any:
    """Import the object that `module:name` names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def find_registered(name: str, group: str, cls: type[T], key: str, known: Collection[str] = ()) -> T:
    """Return the `cls` that is registered as `name` in the entry-point group `group`.

    ValueError, one line that begins with `key`, if there is none, with the names to choose from (`known` are further
    ones), or as `load_registered`."""
    points = {point.name: point for point in entry_points(group=group)}
    if name not in points:
        raise ValueError(f"{key}: expected one of {sorted({*known, *points})}, got {name!r}")
    return load_registered(points[name], cls, key)
