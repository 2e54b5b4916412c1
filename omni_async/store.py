"""Defines the data plane, which holds tensors while messages about them travel.

A role knows `put` and `get` alone. Its store decides whether the reference is a Ray object reference or the
object itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class ObjectLost(LookupError):
    """A stored value is gone, with the process or the machine that had it."""


class ObjectStore(Protocol):
    async def put(self, value: Any) -> Any:
        """Store `value`; the object lives as long as the returned reference is held anywhere."""

    async def put_all(self, values: Sequence[Any]) -> list[Any]:
        """Return a reference for each of the values.

        Small ones may be stored together, and then live and travel together: give values in one call that the same
        readers want at about the same time."""

    async def get(self, reference: Any) -> Any:
        """Return the stored value, shared with every holder of the reference: it must not be written to.

        Raises ObjectLost if it is gone."""


class LocalStore:
    """A store for one process: the reference is the value."""

    async def put(self, value: Any) -> Any:
        return value

    async def put_all(self, values: Sequence[Any]) -> list[Any]:
        return list(values)

    async def get(self, reference: Any) -> Any:
        return reference


def nbytes(value: Any) -> int:
    """Return the bytes of an array, a tensor or a TensorDict, or of any object with the same attributes for it."""
    size = getattr(value, "nbytes", None)
    return int(value.bytes() if size is None else size)
