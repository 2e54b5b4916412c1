"""Runs one trainer rank: the engine of `omni_async.training` behind async calls, all its work in one thread and in call
order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from omni_async.checkpoint.state import read_state
from omni_async.store import ObjectStore
from omni_async.types import SampleDrift, TrainGroup
from omni_async.weights.snapshot import Snapshot

if TYPE_CHECKING:
    from omni_async.training.engine import TrainEngine
    from omni_async.training.groups import GroupBatch
    from omni_async.weights.buckets import BucketSet

T = TypeVar("T")

# A rank that waits longer than this for the others in a collective gives up: one of them is gone.
_COLLECTIVE_TIMEOUT_S = 600.0


class Rank:
    """A trainer rank. `build` makes the engine (imports torch, loads nothing); it runs in the rank's thread like
    everything after it. `paired`: the objective trains preference pairs."""

    def __init__(
        self, rank: int, world_size: int, build: Callable[[], TrainEngine], store: ObjectStore, paired: bool = False
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._build = build
        self._store = store
        self._paired = paired
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"trainer-{rank}")
        self._free: list[BucketSet] = []
        self._fetched: dict[int, list[Any]] = {}  # this rank's share of the update's groups
        self._spent: set[int] = set()  # groups accumulated since the last step

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def setup(self, resume: str | None, rendezvous: str | None) -> None:
        """Joins the other ranks at `rendezvous` (a torch.distributed init method) if there are any, loads the model,
        and the checkpoint if there is one."""

        def work() -> None:
            self._engine = self._build()
            if rendezvous is not None:
                from omni_async.training.device import init_process_group

                init_process_group(self._rank, self._world_size, rendezvous, _COLLECTIVE_TIMEOUT_S, self._engine.device)
            self._engine.setup()
            if resume is not None:
                self._engine.load(resume, read_state(Path(resume)).engine)

        await self._run(work)

    async def fetch(self, group: int, trajectories: Sequence[Any]) -> None:
        """Reads this rank's share of a group: see `RankApi`."""
        self._fetched[group] = await asyncio.gather(
            *(self._store.get(reference) for reference in trajectories[self._mine])
        )

    @property
    def _mine(self) -> slice:
        """Selects every world_size-th sample; of a preference pair both, since its noise draws are divided among the
        ranks instead."""
        return slice(None) if self._paired else slice(self._rank, None, self._world_size)

    async def recompute_proximal(self, batch: TrainGroup) -> list[SampleDrift]:
        """Runs a forward pass over this rank's share of a group, before the update's first step."""
        mine = self._share(batch)
        return await self._run(lambda: self._engine.recompute_proximal(mine))

    async def accumulate(self, batch: TrainGroup, row_weight: float) -> None:
        """Runs forward and backward over this rank's share of a group."""
        mine = self._share(batch)
        self._spent.add(batch.group)
        await self._run(lambda: self._engine.accumulate(mine, row_weight))

    def _share(self, batch: TrainGroup) -> GroupBatch:
        from omni_async.training.groups import GroupBatch

        mine = self._mine
        return GroupBatch(
            group=batch.group,
            spec=batch.spec,
            trajectories=self._fetched[batch.group],
            advantages=batch.advantages[mine],
            seeds=batch.seeds[mine],
            staleness=tuple(tuple(batch.version - v for v in versions) for versions in batch.step_versions[mine]),
            weights=batch.weights[mine] if batch.weights is not None else None,
        )

    async def step(self, grad_scale: float) -> dict[str, float]:
        for group in self._spent:
            del self._fetched[group]
        self._spent.clear()
        return await self._run(lambda: self._engine.step(grad_scale))

    async def discard(self) -> None:
        self._spent.clear()
        await self._run(lambda: self._engine.discard())

    async def export(self, version: int) -> Snapshot | None:
        """Copies the weights out as `version`; None off rank 0. The memory of snapshots that were released is used
        again: two sets are enough where at most one snapshot is on its way when the next is taken."""
        return await self._run(lambda: self._snapshot(version))

    def _snapshot(self, version: int) -> Snapshot | None:
        buckets = self._free.pop() if self._free else self._engine.bucket_set()
        snapshot = self._engine.snapshot(version, buckets)
        return None if snapshot is None else replace(snapshot, release=partial(self._free.append, buckets))

    async def begin_save(self, folder: str) -> dict[str, Any]:
        self._saving, state = await self._run(lambda: self._engine.begin_save(folder))
        return state

    async def end_save(self) -> None:
        await asyncio.wrap_future(self._saving)
