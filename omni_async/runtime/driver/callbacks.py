"""Calls functions of the user with every line of a run's metrics, in a thread, one call after another.

Waits for lines, and for the functions. A function that raises ends the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omni_async.aio.threads import in_daemon_thread
from omni_async.rewards.failures import place_of, told
from omni_async.rewards.functions import label_of

Callback = Callable[[Mapping[str, Any]], object]


class CallbackFailed(RuntimeError):
    """A callback raised; the text is one line with the place."""


class Callbacks:
    """The callbacks of a run. Lines that `put` received are passed on by `run`, in order."""

    def __init__(self, functions: Sequence[Callback] = ()) -> None:
        self.functions = functions
        self._lines = asyncio.Queue[Mapping[str, Any]]()

    def put(self, line: Mapping[str, Any]) -> None:
        if self.functions:
            self._lines.put_nowait(line)

    async def run(self) -> None:
        """Call the functions until cancelled. Raises CallbackFailed."""
        while True:
            line = await self._lines.get()
            for one in self.functions:
                try:
                    await in_daemon_thread(one, line)
                except Exception as error:  # noqa: BLE001 (foreign code)
                    name = label_of(getattr(one, "func", one))
                    raise CallbackFailed(f"callback {name!r}: {told(error)}{place_of(error)}") from None
            self._lines.task_done()

    async def all_called(self) -> None:
        """Wait until every line has been passed to every function."""
        await self._lines.join()
