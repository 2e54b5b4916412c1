"""Runs one trainer rank: the engine of `omni_async.training` behind async calls, in one thread and in call order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from omni_async.aio.threads import DaemonThread
from omni_async.checkpoint.state import read_state
from omni_async.config.layout import ParallelLayout
from omni_async.roles.trajectories import read_trajectory
from omni_async.store import ObjectStore
from omni_async.types import SampleDrift, TrainGroup
from omni_async.weights.snapshot import SharedRows, Snapshot

if TYPE_CHECKING:
    from omni_async.training.engine import TrainEngine
    from omni_async.training.groups import GroupBatch
    from omni_async.weights.buckets import BucketSet

T = TypeVar("T")

# Time limit for a rank's wait in a collective: after it, one of the other ranks is gone.
_COLLECTIVE_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class _Share:
    """This rank's share of a group: samples, by number, and their trajectories.

    `counts`: False if its share is empty and it takes a sample of another rank, because the passes are collective."""

    samples: Sequence[int]
    counts: bool
    trajectories: list[Any]


@dataclass(eq=False)
class Rank:
    """A trainer rank, at its place in `layout`.

    `build` creates the engine (imports torch, loads nothing); it runs in the rank's thread like all later work.
    `paired`: the objective trains preference pairs."""

    layout: ParallelLayout
    build: Callable[[], TrainEngine]
    store: ObjectStore
    paired: bool = False

    def __post_init__(self) -> None:
        self._thread = DaemonThread(f"trainer-{self.layout.rank}")
        self._free: list[BucketSet] = []
        self._exported: dict[int, Snapshot] = {}  # until `share` returns them
        self._sharing = asyncio.Lock()  # of the memory of exported rows
        self._fetched: dict[int, _Share] = {}  # by group of the update
        self._spent: set[int] = set()  # groups accumulated since the last step

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def setup(self, resume: str | None, rendezvous: str | None) -> None:
        def work() -> None:
            self._engine = self.build()
            if rendezvous is not None:
                from omni_async.training.device import init_process_group

                rank, world = self.layout.rank, self.layout.world_size
                init_process_group(rank, world, rendezvous, _COLLECTIVE_TIMEOUT_S, self._engine.device)
            self._engine.setup()
            if resume is not None:
                self._engine.load(resume, read_state(Path(resume)).engine)

        await self._in_thread(work)

    async def fetch(self, group: int, trajectories: Sequence[Any], start: int) -> None:
        """Read this rank's share of a group: see `RankApi`."""
        number = len(trajectories)
        # Every rank takes both samples of a preference pair: their noise draws are dealt instead.
        dealt = range(number) if self.paired else self.layout.dealt(number, start)
        samples = dealt or range(1)
        read = await asyncio.gather(*(read_trajectory(self.store, trajectories[i]) for i in samples))
        self._fetched[group] = _Share(samples, bool(dealt), read)

    async def recompute_proximal(self, batch: TrainGroup) -> list[SampleDrift]:
        """Run a forward pass over this rank's share of a group, before the update's first step: see `RankApi`."""
        mine = self._share(batch)
        found = await self._in_thread(lambda: self._engine.recompute_proximal(mine))
        return found if batch.weighed else []

    async def accumulate(self, batch: TrainGroup, row_weight: float) -> None:
        """Run forward and backward over this rank's share of a group."""
        mine = self._share(batch)
        self._spent.add(batch.group)
        await self._in_thread(lambda: self._engine.accumulate(mine, row_weight))

    def _share(self, batch: TrainGroup) -> GroupBatch:
        from omni_async.training.groups import GroupBatch

        share = self._fetched[batch.group]
        mine = share.samples
        return GroupBatch(
            group=batch.group,
            spec=batch.spec,
            trajectories=share.trajectories,
            advantages=tuple(batch.advantages[i] for i in mine),
            seeds=tuple(batch.seeds[i] for i in mine),
            staleness=tuple(tuple(batch.version - v for v in batch.step_versions[i]) for i in mine),
            size=len(batch.seeds),
            weights=tuple(batch.weights[i] for i in mine) if batch.weights is not None else None,
            proximal_ratio=batch.proximal_ratio,
            counts=share.counts,
            prompts=None if batch.prompt is None else [batch.prompt] * len(mine),
        )

    async def step(self, grad_scale: float) -> dict[str, float]:
        for group in self._spent:
            del self._fetched[group]
        self._spent.clear()
        return await self._in_thread(lambda: {**self._engine.step(grad_scale), **self._engine.operations()})

    async def discard(self) -> None:
        self._spent.clear()
        await self._in_thread(lambda: self._engine.discard())

    async def export(self, version: int) -> Snapshot | None:
        """Copy this rank's rows of the weights out as `version`.

        Returns them on rank 0, and None elsewhere, where `share` stores them. The memory of released snapshots is
        reused. Two sets suffice on rank 0, where at most one snapshot is being sent when the next is taken, and one
        elsewhere, where the next waits."""
        async with self._sharing:
            snapshot = await self._in_thread(lambda: self._snapshot(version))
        if self.layout.rank == 0 or snapshot is None:
            return snapshot
        self._exported[version] = snapshot
        return None

    async def share(self, version: int) -> SharedRows:
        """Copy the rows exported as `version` into the store, alongside the training, and free their memory."""
        snapshot = self._exported.pop(version)
        async with self._sharing:
            try:
                # In sequence: many writing threads would take the cores from the training thread.
                references = [await self.store.put(bucket) for bucket in snapshot.buckets]
            finally:
                snapshot.release()
        return SharedRows(snapshot.tensors, references)

    def _snapshot(self, version: int) -> Snapshot | None:
        buckets = self._free.pop() if self._free else self._engine.bucket_set()
        snapshot = self._engine.snapshot(version, buckets)
        return None if snapshot is None else replace(snapshot, release=partial(self._free.append, buckets))

    async def begin_save(self, folder: str) -> dict[str, Any]:
        self._saving, state = await self._in_thread(lambda: self._engine.begin_save(folder))
        return state

    async def end_save(self) -> None:
        await asyncio.wrap_future(self._saving)
