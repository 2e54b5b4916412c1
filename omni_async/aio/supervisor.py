"""Owns every task of a run.

Tasks are started by name. The first failed task, or `stop()`, ends all of them. Leaving the `async with` block waits
until each has really finished, so nothing outlives the block. The failure that ended it is raised with its task's name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from omni_async.aio.waiting import Event, cancel


class TaskFailed(RuntimeError):
    """A supervised task raised; `__cause__` is its exception."""

    def __init__(self, task: str, cause: BaseException) -> None:
        super().__init__(f"{task}: {type(cause).__name__}: {cause}")
        self.task = task
        self.__cause__ = cause


class Supervisor:
    """The owner of a run's tasks.

    `async with Supervisor() as tasks: tasks.start_task("producer-0", producer.run()); await tasks.wait()`"""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[Any], str] = {}
        self._changed = Event()

    async def __aenter__(self) -> Supervisor:
        return self

    def start_task(self, name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self._tasks[task] = name
        task.add_done_callback(lambda _: self._changed.notify())
        self._changed.notify()
        return task

    async def wait(self) -> None:
        """Wait until every task finished. Raises TaskFailed as soon as any task fails."""
        while True:
            for task, name in self._tasks.items():
                if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                    raise TaskFailed(name, error)
            if all(task.done() for task in self._tasks):
                return
            await self._changed.wait()

    async def settle(self) -> None:
        """Wait until every task has finished, whether it succeeded or not."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def stop(self) -> None:
        """Cancel the tasks that still run and wait for them."""
        await cancel(self._tasks)

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
