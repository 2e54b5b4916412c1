"""The data plane: where tensors wait while messages about them travel.

`put` and `get` are all a role knows. Which store it has decides whether the reference is a Ray object reference or the object itself.
"""

from __future__ import annotations

from typing import Any, Protocol


class ObjectStore(Protocol):
    async def put(self, value: Any) -> Any:
        """Store `value`; the object lives as long as somebody holds the returned reference."""

    async def get(self, reference: Any) -> Any:
        """The stored value. Raises LookupError if it is gone."""


class LocalStore:
    """One process: the reference is the value."""

    async def put(self, value: Any) -> Any:
        return value

    async def get(self, reference: Any) -> Any:
        return reference
