"""The data plane: where tensors wait while messages about them travel.

`put` and `get` are all a role knows. Which store it has decides whether the reference is a Ray object reference or the
object itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class ObjectLost(LookupError):
    """A stored value is gone, with the process or the machine that had it."""


class ObjectStore(Protocol):
    async def put(self, value: Any) -> Any:
        """Store `value`; the object lives as long as somebody holds the returned reference."""

    async def put_all(self, values: Sequence[Any]) -> list[Any]:
        """A reference for each of the values. Small ones may be stored together, and then live and travel together:
        give values in one call that the same readers want at about the same time."""

    async def get(self, reference: Any) -> Any:
        """The stored value, shared with everybody who has the reference: it must not be written to. Raises ObjectLost
        if it is gone."""


class LocalStore:
    """One process: the reference is the value."""

    async def put(self, value: Any) -> Any:
        return value

    async def put_all(self, values: Sequence[Any]) -> list[Any]:
        return list(values)

    async def get(self, reference: Any) -> Any:
        return reference


def nbytes(value: Any) -> int:
    """Bytes of an array, a tensor or a TensorDict, or of anything that says so as they do."""
    size = getattr(value, "nbytes", None)
    return int(value.bytes() if size is None else size)
