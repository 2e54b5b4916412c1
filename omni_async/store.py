"""Defines the data plane, which holds tensors while messages that refer to them travel.

A role only uses `put` and `get`. Its store decides whether the reference is a Ray object reference or the object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class ObjectLost(LookupError):
    """A stored value is gone, because the process or the machine that held it is."""


class ObjectStore(Protocol):
    async def put(self, value: Any) -> Any:
        """Store `value`; the object lives as long as the returned reference is held anywhere."""

    async def put_all(self, values: Sequence[Any]) -> list[Any]:
        """Return a reference for each of the values.

        Small values may be stored together; then they are freed and transferred together. Pass values in one call if
        the same readers need them at about the same time."""

    async def get(self, reference: Any) -> Any:
        """Return the stored value, shared with every holder of the reference: do not write to it.

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
    """Return the bytes of an array, a tensor, a TensorDict, or any object with the same attributes."""
    size = getattr(value, "nbytes", None)
    return int(value.bytes() if size is None else size)
