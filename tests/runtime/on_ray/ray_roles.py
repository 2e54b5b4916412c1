"""Provides tiny roles for the tests of the Ray shell, which use no Ray themselves."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from omni_async.aio.waiting import Event
from omni_async.roles.builders import WorkerContext
from tests.support.patience import wait_for


class UnsettledError(RuntimeError):
    @property
    def count(self) -> int:
        return self.args[1]


class BulkyError(RuntimeError):
    """An exception that cannot be taken apart and put together again."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where}: {what}")


class Meeting:
    """A role on which some wait until another ends the wait, all on one loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = Event()
        self._open = False

    async def next_groups(self, version: int, places: int) -> int:  # a long call, by its name
        assert asyncio.get_running_loop() is self._loop
        while not self._open:
            await self._event.wait()
        return version

    async def announce(self, version: int, digest: str) -> int:  # a control call: how many wait
        assert asyncio.get_running_loop() is self._loop
        return self._event.waiting

    async def stop(self, reason: str) -> None:
        self._open = True
        self._event.notify()


class Counter:
    async def threads(self) -> int:
        import torch

        return torch.get_num_threads()


class Echo:
    async def phase(self, value: Any) -> Any:
        return value

    async def fail(self, reason: str) -> None:
        raise UnsettledError(reason, 3)

    async def run(self) -> None:
        raise ValueError("a long call's failure")

    async def require_fields(self, fields: tuple[str, ...]) -> None:
        raise BulkyError("the far side", fields[0])

    async def stop(self, reason: str) -> None:
        os._exit(1)

    async def announce(self, version: int, digest: str) -> None:
        """Holds its loop until there is a file in the folder `digest`."""
        (Path(digest) / "held").touch()
        wait_for((Path(digest) / "free").exists, "the release of the engine")


class Caller:
    def __init__(self, other: Any) -> None:
        self._other = other

    async def phase(self, value: Any) -> Any:
        return ["through another", await self._other.phase(value)]

    async def announce(self, version: int, digest: str) -> str:
        try:
            await self._other.fail("told to")
        except UnsettledError as error:
            return f"{type(error).__name__} {error.count}"
        return "nothing"


class Keeper:
    def __init__(self, store: Any) -> None:
        self._store = store

    async def phase(self, references: list[Any]) -> dict[str, Any]:
        [value] = [await self._store.get(reference) for reference in references]
        return {"value": value, "reference": await self._store.put(value)}


class Unbuildable:
    def __init__(self) -> None:
        raise LookupError("no model at this path")


def loud(context: WorkerContext) -> Echo:
    """Prints as it builds a role."""
    sys.stdout.write(f"{context.name} prints\n")
    os.system("echo a child prints")
    return Echo()
