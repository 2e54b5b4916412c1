"""The task in which an engine on an event loop does its work, from `start` to `close`. Waits for its end in `close`, which cancels it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from omni_async.rollout.base import EngineError


class EngineTask:
    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.create_task(work, name=f"{self._engine}-runner")

    def require(self) -> None:
        """EngineError unless the work goes on."""
        if self._task is None or self._task.done():
            raise EngineError(f"{self._engine} is not running")

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
