"""Loads what other packages register in entry points, and what a table names as `module:name`.

Other packages are foreign code and may break in any way.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints, entry_points
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
        raise ValueError(f"{where} is of type {type(found).__name__}, not {cls.__name__}")
    return found


def load_named(name: str) -> Any:
    """Import the object that `module:name` names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def find_registered(name: str, group: str, cls: type[T], key: str, known: Collection[str] = ()) -> T:
    """Return the `cls` that is registered as `name` in the entry-point group `group`.

    Args:
        name: what the recipe says.
        group: the group of entry points.
        cls: what the entry point must lead to.
        key: the recipe's key, with which an error begins.
        known: further names to choose from.

    Raises:
        ValueError: one line, if there is none, with the names to choose from, or as `load_registered`."""
    points = entry_points(group=group)
    if name not in points.names:
        raise ValueError(f"{key}: expected one of {sorted({*known, *points.names})}, got {name!r}")
    return load_registered(the_one(points, name, key), cls, key)


def the_one(points: EntryPoints, name: str, key: str) -> EntryPoint:
    """Return the entry point called `name`.

    Args:
        points: those of one group.
        name: one of theirs.
        key: the recipe's key, with which an error begins.

    Raises:
        ValueError: one line, if packages register different things under that name: the order of the path would decide
            whose is taken."""
    found = {point.value: point for point in points.select(name=name)}
    if len(found) > 1:
        raise ValueError(f"{key}: {name!r} is registered more than once, as {sorted(found)}; uninstall all but one")
    return next(iter(found.values()))
