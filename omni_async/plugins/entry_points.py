"""Finds this project's objects and registered objects of other packages by name, and loads `module:name` references.

Other packages are foreign code and may break in any way.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from types import MappingProxyType
from typing import Any, TypeVar

T = TypeVar("T")

OBJECTIVES = "omni_async.objectives"  # its objects are `Objective`s of `omni_async.algorithms.registry`


def load_named(name: str) -> Any:
    """Import the object that `module:name` names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the closest known name, or "" if none is close."""
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def not_one_of(name: str, known: Collection[str], also: str = "") -> str:
    """Return the message about an unknown name; `also` describes accepted values other than names."""
    return f"expected one of {[*known]}{also}, got {name!r}{did_you_mean(name, known)}"


@lru_cache(maxsize=64)
def _scanned(scan: Callable[[], Any], path: tuple[str, ...]) -> Any:
    return scan()


def _installed(group: str) -> EntryPoints:
    """Return a group's entry points.

    A search opens a file of every package and lists every folder of the Python path. So one search serves all groups,
    until the path changes."""
    found: EntryPoints = _scanned(entry_points, tuple(sys.path)).select(group=group)
    return found


def registered_names(group: str, own: Iterable[str] = ()) -> tuple[str, ...]:
    """Return this project's own names and those of the entry-point group `group`, sorted."""
    return tuple(sorted({*own, *_installed(group).names}))


def find_point(
    name: str, group: str, key: str, own: Mapping[str, T] = MappingProxyType({}), also: str = ""
) -> T | EntryPoint:
    """Return the object called `name`: this project's own, or the only entry point of that name in `group`.

    Args:
        name: the value in the recipe.
        group: the group of entry points.
        key: the recipe's key, with which an error begins.
        own: this project's objects, by name.
        also: other values that the recipe may use, for the error.

    Raises:
        ValueError: one line; the name is unknown, or registered several times, so that the order of the path would
            decide."""
    found = {point.value: point for point in _installed(group).select(name=name)}
    if name in own:
        if found:
            raise ValueError(f"{key}: {name!r} is built in, and registered as {sorted(found)}; rename that entry point")
        return own[name]
    if not found:
        raise ValueError(f"{key}: {not_one_of(name, registered_names(group, own), also)}")
    if len(found) > 1:
        raise ValueError(f"{key}: {name!r} is registered more than once, as {sorted(found)}; uninstall all but one")
    return next(iter(found.values()))


def find_registered(
    name: str, group: str, cls: type[T], key: str, own: Mapping[str, T] = MappingProxyType({}), also: str = ""
) -> T:
    """Return the `cls` called `name`; load it if another package registers it.

    Args:
        name, group, key, own, also: as for `find_point`, with its errors.
        cls: the type that the entry point must load.

    Raises:
        ValueError: one line; the entry point cannot be imported, or is no `cls`."""
    point = find_point(name, group, key, own, also)
    if not isinstance(point, EntryPoint):
        return point
    where = f"{key}: {name!r} is registered as {point.value!r}, which"
    try:
        found = point.load()
    except (Exception, SystemExit) as error:  # noqa: BLE001 (KeyboardInterrupt stays the user's)
        raise ValueError(f"{where} cannot be imported: {type(error).__name__}: {error}") from None
    if not isinstance(found, cls):
        raise ValueError(f"{where} is of type {type(found).__name__}, not {cls.__name__}")
    return found
