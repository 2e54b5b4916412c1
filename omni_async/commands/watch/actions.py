"""Sends the page's requests to a running job, over its control socket, and records them in `actions.jsonl`.

Waits for the run's answer; a request to scale is answered when the new workers are at work.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from omni_async.aio.threads import in_daemon_thread
from omni_async.records.write.rundir import RunDirectory, append_jsonl
from omni_async.runtime.driver.control_socket import MOST_WORKERS, ControlError, Request, ask

_KEPT = 20
_ROLE = Meta(pattern=r"^[a-z][a-z_]{0,39}\Z")


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A button's request: the end of the run, or numbers of workers by role."""

    action: Literal["stop", "scale"]
    workers: Annotated[
        dict[Annotated[str, _ROLE], Annotated[int, Meta(ge=1, le=MOST_WORKERS)]], Meta(max_length=32)
    ] = {}

    def __post_init__(self) -> None:
        if (self.action == "scale") != bool(self.workers):
            raise ValueError("scale needs workers, and stop takes none")


class Action(msgspec.Struct, frozen=True):
    """A line of `actions.jsonl`. `result`: "done", or the error; `seconds`: the time until the run's answer."""

    time: float
    action: str
    workers: dict[str, int]
    address: str
    result: str
    seconds: float


class Actions:
    """The actions of a page. Requests to scale run one at a time; stopping does not wait. `changed`: called at news."""

    def __init__(self, run: RunDirectory, changed: Callable[[], None]) -> None:
        self._run = run
        self._changed = changed
        self._path: Path = run.path / "actions.jsonl"
        self._scaling = asyncio.Lock()
        self.recent: deque[Action] = deque(maxlen=_KEPT)
        self.doing: str | None = None  # the run's current activity for a request

    async def do(self, asked: Asked, address: str) -> Action:
        """Send and record a request. Raises RunDirectoryError if only the recording failed."""
        async with self._scaling if asked.action == "scale" else contextlib.nullcontext():
            began = time.time()
            self._told("asked")
            result = "the page was closed, or its server ended, before the run had answered"
            try:
                result = await self._ask(asked)
            finally:
                self.doing = None
                action = Action(began, asked.action, asked.workers, address, result, round(time.time() - began, 3))
                self.recent.append(action)
                self._changed()
                append_jsonl(self._path, action)
            return action

    async def _ask(self, asked: Asked) -> str:
        request = Request(scale=asked.workers, stop=asked.action == "stop")
        loop = asyncio.get_running_loop()

        def tell(text: str) -> None:
            loop.call_soon_threadsafe(self._told, text)

        try:
            await in_daemon_thread(lambda: ask(self._run.control, request, tell=tell))
        except ControlError as error:
            return str(error)
        return "done"

    def _told(self, text: str) -> None:
        self.doing = text
        self._changed()
