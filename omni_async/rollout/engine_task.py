"""Runs the task in which an engine on an event loop does its work, from `start` to `close`.

`close` cancels the task and waits for its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from omni_async.rollout.base import EngineError


class EngineTask:
    """The task of an engine's work.

    `unanswered` returns the futures that callers wait for: when the work ends, with an error or because it was closed,
    they get an EngineError."""

    def __init__(self, engine: str, unanswered: Callable[[], Iterable[asyncio.Future[Any]]]) -> None:
        self._engine = engine
        self._unanswered = unanswered
        self._work: Coroutine[Any, Any, None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure: str | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        self._work = work
        self._task = asyncio.create_task(self._run(work), name=f"{self._engine}-runner")

    def require(self) -> None:
        """Raise EngineError, with the cause of the end, unless the work goes on."""
        if self._task is None or self._task.done():
            raise EngineError(f"{self._engine} is not running" + (f": {self._failure}" if self._failure else ""))

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 (reported to all waiters, and to later callers)
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            self._answer()

    def _answer(self) -> None:
        for future in self._unanswered():
            if not future.done():
                future.set_exception(EngineError(f"{self._engine} {self._failure or 'was closed'}"))

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is None or self._work is None:
            return
        task.cancel()
        await asyncio.wait([task])
        self._work.close()  # a task that is cancelled before its first step never runs the coroutine
        self._answer()
