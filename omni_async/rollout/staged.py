"""Holds the one version that an engine has taken in and not switched to yet. Owned by the engine; waits for nothing."""

from __future__ import annotations

from typing import Generic, TypeVar

from omni_async.rollout.base import EngineError

T = TypeVar("T")


class StagedVersion(Generic[T]):
    """A version that an engine may switch to. `T` is the type of the content that the engine needs for the switch."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._staged: tuple[int, T] | None = None

    def put(self, version: int, content: T) -> None:
        """Replace the version that was staged before."""
        self._staged = version, content

    def take(self, version: int) -> T:
        """Take the version out. EngineError, and nothing taken, unless `version` was staged last."""
        if self._staged is None or self._staged[0] != version:
            raise EngineError(
                f"{self._engine}: asked for version {version}, staged is {self._staged and self._staged[0]}"
            )
        (_, content), self._staged = self._staged, None
        return content
