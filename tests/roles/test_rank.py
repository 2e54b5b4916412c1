"""Tests a rank's share of a group, and in which thread and order its engine works."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omni_async.checkpoint.state import State, write_state
from omni_async.config.layout import ParallelLayout
from omni_async.control.control_state import ControlState
from omni_async.roles.rank import Rank
from omni_async.store import LocalStore, ObjectLost
from omni_async.training.groups import GroupBatch
from omni_async.types import SampleDrift, TrainGroup, VersionSpans
from omni_async.weights.buckets import BucketSet, unpack
from omni_async.weights.snapshot import Snapshot
from tests.roles.actor_world import LossyStore
from tests.support.loops import settle


class Engine:
    """Records its calls."""

    def __init__(self) -> None:
        self.spare = False  # its weights are a further copy
        self.sets: list[BucketSet] = []
        self.groups: list[tuple[str, GroupBatch]] = []
        self.threads: set[str] = set()
        self.calls: list[str] = []
        self.saving: Future[None] = Future()

    def setup(self) -> None:
        self._called("setup")

    def load(self, folder: str, state: dict[str, Any]) -> None:
        self._called(f"load {Path(folder).name} {state}")

    def recompute_proximal(self, group: GroupBatch) -> list[SampleDrift]:
        self._called("proximal", group)
        return [SampleDrift((float(number),), None, 4, (0,)) for number in group.trajectories]

    def accumulate(self, group: GroupBatch, row_weight: float) -> None:
        self._called(f"accumulate {row_weight}", group)

    def operations(self) -> dict[str, float]:
        return {"flops/sum": 2.0}

    def step(self, grad_scale: float) -> dict[str, float]:
        self._called(f"step {grad_scale}")
        return {"loss": 1.0}

    def discard(self) -> None:
        self._called("discard")

    def bucket_set(self) -> BucketSet:
        self.sets.append(BucketSet(64))
        return self.sets[-1]

    def snapshot(self, version: int, buckets: BucketSet) -> Snapshot | None:
        self._called(f"snapshot {version}")
        if self.spare:
            return None
        buckets.fill([("t", torch.full((4,), float(version)))])
        return Snapshot(version, "full", buckets.specs, buckets.buckets)

    def begin_save(self, folder: str) -> tuple[Future[None], dict[str, Any]]:
        self._called(f"save {folder}")
        return self.saving, {"optimizer_steps": 7}

    def _called(self, what: str, group: GroupBatch | None = None) -> None:
        self.calls.append(what)
        self.threads.add(threading.current_thread().name)
        if group is not None:
            self.groups.append((what.split()[0], group))


async def started(
    rank: int, world: int, paired: bool = False, store: Any = None, resume: str | None = None
) -> tuple[Rank, Engine]:
    engine = Engine()
    made = Rank(ParallelLayout(rank, world), lambda: engine, store or LocalStore(), paired)
    await made.setup(resume, None)
    return made, engine


async def test_one_thread_works_in_call_order():
    made, engine = await started(0, 1)
    await asyncio.gather(made.step(1.0), made.discard(), made.step(2.0), made.begin_save("folder"), made.step(3.0))
    assert engine.calls == ["setup", "step 1.0", "discard", "step 2.0", "save folder", "step 3.0"]
    assert len(engine.threads) == 1 and threading.current_thread().name not in engine.threads


class CopyingStore(LocalStore):
    """A store that copies, as for another process."""

    async def put(self, value: Any) -> Any:
        return value.copy()


@pytest.mark.parametrize("fails", [False, True])
async def test_exports_wait_while_rows_are_shared(fails):
    opened = asyncio.Event()

    class Slow(CopyingStore):
        async def put(self, value: Any) -> Any:
            await opened.wait()
            if fails:
                raise OSError("the store is full")
            return await super().put(value)

    made, engine = await started(1, 2, store=Slow())
    await made.export(2)
    sharing, following = asyncio.create_task(made.share(2)), asyncio.create_task(made.export(3))
    await settle()
    await made.discard()  # the rank's thread has no other work
    await settle()
    assert not following.done() and engine.calls.count("snapshot 3") == 0
    opened.set()
    await following
    with pytest.raises(OSError, match="full") if fails else contextlib.nullcontext():
        assert (await sharing).tensors
    assert len(engine.sets) == 1, "the memory is used again, also of what could not be put"


def make_batch(size: int, group: int = 9, weights: bool = False) -> TrainGroup:
    """Makes a batch: every element of sample i is i."""
    numbers = range(size)
    return TrainGroup(
        group=group,
        version=7,
        spec="spec",
        advantages=tuple(float(i) for i in numbers),
        seeds=tuple(numbers),
        step_versions=tuple(VersionSpans.of((7 - i, 6 - i)) for i in numbers),
        weights=tuple((float(i), float(i)) for i in numbers) if weights else None,
        proximal_ratio=weights,
        weighed=weights,
    )


@pytest.mark.parametrize(
    ("rank", "world", "start", "size", "paired", "own"),
    [
        (0, 1, 0, 5, False, [0, 1, 2, 3, 4]),
        (1, 2, 5, 5, False, [0, 2, 4]),  # rank 0 had three of the group before
        (2, 4, 0, 2, False, None),
        *((rank, 4, 2 * rank, 2, True, [0, 1]) for rank in (0, 3)),
    ],
)
async def test_shares_of_groups(rank, world, start, size, paired, own):
    made, engine = await started(rank, world, paired)
    weights = not paired
    batch = make_batch(size, weights=weights)
    await made.fetch(9, range(size), start)
    drifts = await made.recompute_proximal(batch)
    await made.accumulate(batch, 0.25)
    [_, (_, group)] = engine.groups
    taken = own or [0]
    assert (group.group, group.size, group.counts) == (9, size, own is not None)
    assert [*group.trajectories] == [*group.advantages] == [*group.seeds] == taken
    assert [*group.staleness] == [(i, i + 1) for i in taken]
    assert group.weights == (tuple((float(i), float(i)) for i in taken) if weights else None)
    assert group.proximal_ratio == batch.proximal_ratio == weights
    assert [drift.log_ratio for drift in drifts] == [(float(i),) for i in taken if weights], "only if they are read"
    assert engine.calls[-1] == "accumulate 0.25"


async def test_a_share_is_read_once_and_kept_until_its_step():
    store = LossyStore("b", "gone")  # `b`: another rank's
    made, engine = await started(1, 2, store=store)
    first, second, third = (make_batch(4, group) for group in (9, 10, 11))
    await made.fetch(9, ["b", 1, "b", 3], 0)
    await made.fetch(10, range(4), 0)
    with pytest.raises(ObjectLost, match="gone is gone"):
        await made.fetch(11, [0, "gone", 2, 3], 0)
    store.lost = {1, 3}
    await made.recompute_proximal(first)
    await made.accumulate(first, 1.0)
    await made.discard()
    await made.accumulate(first, 1.0)
    assert [(kind, [*group.trajectories]) for kind, group in engine.groups] == [
        ("proximal", [1, 3]),
        ("accumulate", [1, 3]),
        ("accumulate", [1, 3]),
    ]
    await made.step(1.0)
    await made.accumulate(second, 1.0)  # fetched, and not in that step
    await made.step(1.0)
    for batch in (first, second, third):
        with pytest.raises(KeyError):
            await made.accumulate(batch, 1.0)


async def test_snapshots_keep_their_content_until_they_are_released():
    def content(snapshot: Snapshot) -> list[float]:
        [(_, tensor)] = unpack(snapshot.manifest(), snapshot.buckets)
        return tensor.tolist()

    made, engine = await started(0, 1)
    first, second = await made.export(1), await made.export(2)
    for version in range(3, 7):
        second.release()
        before, second = second, await made.export(version)
        assert (content(first), content(second)) == ([1.0] * 4, [version] * 4)
        assert second.buckets[0] is not before.buckets[0]
        assert np.shares_memory(second.buckets[0], before.buckets[0])
    assert len(engine.sets) == 2


async def test_other_ranks_share_rows_and_reuse_their_memory():
    made, engine = await started(1, 2, store=CopyingStore())
    for version in (2, 3):
        assert await made.export(version) is None
        shared = await made.share(version)
        assert [spec.name for spec in shared.tensors] == ["t"]
        assert torch.equal(torch.from_numpy(shared.references[0]).view(torch.float32), torch.full((4,), version))
    assert len(engine.sets) == 1
    engine.spare = True
    assert await made.export(4) is None
    for version in (3, 4):
        with pytest.raises(KeyError):
            await made.share(version)


async def test_checkpoints_are_read_after_the_model_and_written_alongside_steps(tmp_path: Path):
    folder = tmp_path / "update-000003"
    folder.mkdir()
    write_state(folder, State(ControlState(version=3), "qwen_image", "flow_grpo", {"optimizer_steps": 7}))
    made, engine = await started(0, 1, resume=str(folder))
    assert engine.calls == ["setup", "load update-000003 {'optimizer_steps': 7}"]
    assert await made.begin_save("folder") == {"optimizer_steps": 7}
    written = asyncio.create_task(made.end_save())
    await made.step(1.0)
    assert not written.done()
    engine.saving.set_exception(OSError("no space left on device"))
    with pytest.raises(OSError, match="no space"):
        await written
