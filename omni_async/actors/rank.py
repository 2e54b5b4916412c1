"""One trainer rank: the engine of `omni_async.training` behind async calls, all its work in one thread and in call order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from omni_async.store import ObjectStore
from omni_async.types import WeightManifest

if TYPE_CHECKING:
    from omni_async.training.engine import TrainEngine

T = TypeVar("T")

# A rank that waits longer than this for the others in a collective gives up: one of them is gone.
_COLLECTIVE_TIMEOUT_S = 600.0


class Rank:
    """`build` makes the engine (imports torch, loads nothing); it runs in the rank's thread like everything after it."""

    def __init__(self, rank: int, world_size: int, build: Callable[[], TrainEngine], store: ObjectStore) -> None:
        self._rank = rank
        self._world_size = world_size
        self._build = build
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"trainer-{rank}")

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def setup(self, resume: str | None, rendezvous: str | None) -> dict[str, Any]:
        """Join the other ranks at `rendezvous` (a torch.distributed init method) if there are any, load the model, and the checkpoint if
        there is one; returns what was stored beside it."""

        def work() -> dict[str, Any]:
            self._engine = self._build()
            if rendezvous is not None:
                from omni_async.training.device import init_process_group

                init_process_group(self._rank, self._world_size, rendezvous, _COLLECTIVE_TIMEOUT_S, self._engine.device)
            self._engine.setup()
            return self._engine.load(resume) if resume else {}

        return await self._run(work)

    async def accumulate(self, trajectories: list[Any], advantages: list[float], row_weight: float) -> None:
        """Forward and backward over this rank's share (every world_size-th sample) of a group."""
        from omni_async.training.engine import GroupBatch

        mine = slice(self._rank, None, self._world_size)
        tensors = await asyncio.gather(*(self._store.get(reference) for reference in trajectories[mine]))
        batch = GroupBatch(trajectories=list(tensors), advantages=advantages[mine])
        await self._run(lambda: self._engine.accumulate(batch, row_weight))

    async def step(self, grad_scale: float) -> dict[str, float]:
        return await self._run(lambda: self._engine.step(grad_scale))

    async def discard(self) -> None:
        await self._run(lambda: self._engine.discard())

    async def export(self, version: int) -> tuple[WeightManifest, list[Any]] | None:
        """The payload of `version`, its buckets in the store; None off rank 0."""
        exported = await self._run(lambda: self._engine.export(version))
        if exported is None:
            return None
        manifest, buckets = exported
        return manifest, [await self._store.put(bucket) for bucket in buckets]

    async def save(self, folder: str, extra: dict[str, Any]) -> None:
        await self._run(lambda: self._engine.save(folder, extra))
