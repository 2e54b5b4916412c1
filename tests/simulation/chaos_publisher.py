"""A weight publisher for engines that come and go: the real one, but that a lost engine is told of, and who joins gets the newest version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from omni_async.actors.publisher import WeightPublisher
from omni_async.rollout.base import EngineError
from omni_async.types import WeightManifest


class ElasticPublisher(WeightPublisher):
    def __init__(self, lost: Callable[[str, str], None], start: Callable[[Any], Any], *args: Any) -> None:
        """`lost(name, reason)` is told of engines that did not take a version; `start` runs a coroutine beside."""
        super().__init__(*args)
        self._lost, self._start = lost, start
        self._members: dict[str, tuple[Any, asyncio.Lock]] = {name: (line, asyncio.Lock()) for name, line in self._producers.items()}
        self._sent: dict[str, int] = {}
        self._newest: tuple[WeightManifest, Any] | None = None

    def admit(self, name: str, producer: Any) -> None:
        self._members[name] = (producer, asyncio.Lock())
        if self._newest is not None:
            self._start(self._deliver_newest(name))

    def dismiss(self, name: str) -> None:
        self._members.pop(name, None)

    async def _deliver_to_all(self, manifest: WeightManifest, parcel: object) -> None:
        self._newest = (manifest, parcel)
        await asyncio.gather(*(self._deliver_newest(name) for name in list(self._members)))

    async def _deliver_newest(self, name: str) -> None:
        if (member := self._members.get(name)) is None or self._newest is None:
            return
        producer, lock = member
        async with lock:
            manifest, parcel = self._newest
            if self._sent.get(name, -1) >= manifest.version:
                return
            self._sent[name] = manifest.version
            try:
                await self._deliver(name, producer, manifest, parcel)
            except EngineError as error:
                self.dismiss(name)
                self._lost(name, str(error))
