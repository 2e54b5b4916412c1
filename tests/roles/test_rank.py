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
from msgspec.structs import replace

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
    """Keeps the groups it is given, and who asked."""

    def __init__(self, rank: int = 0, spare: bool = False) -> None:
        self.rank = rank
        self.spare = spare  # its weights are a further copy
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
        return [SampleDrift((float(number),), None, 4) for number in group.trajectories]

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


def make_batch(size: int, weights: bool = False) -> TrainGroup:
    """Makes trajectories in which every element of sample i is i."""
    numbers = range(size)
    return TrainGroup(
        group=9,
        version=7,
        spec="spec",
        advantages=tuple(float(i) for i in numbers),
        seeds=tuple(numbers),
        step_versions=tuple(VersionSpans.of((7 - i, 6 - i)) for i in numbers),
        weights=tuple((float(i), float(i)) for i in numbers) if weights else None,
        proximal_ratio=weights,
    )


async def fetched(made: Rank, size: int, weights: bool = False, start: int = 0) -> TrainGroup:
    """Returns the batch of `make_batch`, once the rank has read it."""
    batch = make_batch(size, weights)
    await made.fetch(batch.group, range(size), start)
    return batch


async def started(
    rank: int, world: int, paired: bool = False, engine: Engine | None = None, store: Any = None, resume: Any = None
) -> tuple[Rank, Engine]:
    engine = engine or Engine(rank)
    made = Rank(ParallelLayout(rank, world), lambda: engine, store or LocalStore(), paired)  # type: ignore[arg-type,return-value]
    await made.setup(resume, None)
    return made, engine


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(
    ("rank", "world", "start", "size", "paired", "own"),
    [
        (0, 1, 0, 5, False, [0, 1, 2, 3, 4]),
        (0, 2, 0, 5, False, [0, 2, 4]),
        (1, 2, 0, 5, False, [1, 3]),
        (1, 2, 5, 5, False, [0, 2, 4]),  # rank 0 had three of the group before
        (0, 3, 10, 5, False, [2]),
        (2, 4, 2, 2, False, [0]),
        (2, 4, 0, 2, False, None),
        (1, 4, 2, 2, False, None),
        *((rank, 4, 2 * rank, 2, True, [0, 1]) for rank in range(4)),
    ],
)
async def test_samples_are_dealt_round_robin_one_that_does_not_count_where_there_is_none_and_of_a_pair_both(
    rank, world, start, size, paired, own, weights
) -> None:
    made, engine = await started(rank, world, paired)
    batch = await fetched(made, size, weights, start)
    drifts = await made.recompute_proximal(batch)
    await made.accumulate(batch, 0.25)
    [(_, _), (_, group)] = engine.groups
    taken = own or [0]
    assert (group.group, group.size, group.counts) == (9, size, own is not None)
    assert [*group.trajectories] == [*group.advantages] == [*group.seeds] == taken
    assert [*group.staleness] == [(i, i + 1) for i in taken]
    assert group.weights == (tuple((float(i), float(i)) for i in taken) if weights else None)
    assert group.proximal_ratio == batch.proximal_ratio == weights
    assert [drift.log_ratio for drift in drifts] == [(float(i),) for i in taken]
    assert engine.calls[-1] == "accumulate 0.25"


async def test_a_rank_reads_its_own_share_of_a_group_once_and_computes_with_it_as_often_as_it_is_asked() -> None:
    store = LossyStore("b")  # another rank's
    made, engine = await started(1, 2, store=store)
    await made.fetch(9, ["b", 1, "b", 3], 0)
    store.lost = {1, 3}
    batch = make_batch(4)
    await made.recompute_proximal(batch)
    await made.accumulate(batch, 1.0)
    await made.discard()
    await made.accumulate(batch, 1.0)
    assert [kind for kind, _ in engine.groups] == ["proximal", "accumulate", "accumulate"]
    assert all([*group.trajectories] == [1, 3] for _, group in engine.groups)


async def test_a_group_is_kept_until_the_step_it_went_into_and_no_longer_and_one_that_cannot_be_read_is_lost() -> None:
    made, _ = await started(0, 1, store=LossyStore("gone"))
    first, second, third = (replace(make_batch(2), group=group) for group in (9, 10, 11))
    await made.fetch(9, range(2), 0)
    await made.fetch(10, range(2), 0)
    with pytest.raises(ObjectLost, match="gone is gone"):
        await made.fetch(11, [0, "gone"], 0)
    await made.accumulate(first, 1.0)
    await made.step(1.0)
    await made.accumulate(second, 1.0)  # fetched, and not in that step
    await made.step(1.0)
    for batch in (first, second, third):
        with pytest.raises(KeyError):
            await made.accumulate(batch, 1.0)
        with pytest.raises(KeyError):
            await made.recompute_proximal(batch)


async def test_all_work_is_done_in_one_thread_in_the_order_it_was_asked_for() -> None:
    made, engine = await started(0, 1)
    await asyncio.gather(made.step(1.0), made.discard(), made.step(2.0), made.begin_save("folder"), made.step(3.0))
    assert engine.calls == ["setup", "step 1.0", "discard", "step 2.0", "save folder", "step 3.0"]
    assert len(engine.threads) == 1 and threading.current_thread().name not in engine.threads


def content(snapshot: Snapshot | None) -> float:
    """Returns the value of every element of its one tensor."""
    assert snapshot is not None
    [(_, tensor)] = unpack(snapshot.manifest(), snapshot.buckets)
    assert len(set(tensor.tolist())) == 1
    return float(tensor[0])


async def test_a_snapshot_stays_as_it_is_until_it_is_released() -> None:
    made, engine = await started(0, 1)
    first, second = await made.export(1), await made.export(2)
    assert (content(first), content(second)) == (1.0, 2.0)
    for version in range(3, 7):
        second.release()
        before, second = second, await made.export(version)
        assert (content(first), content(second)) == (1.0, version)
        assert second.buckets[0] is not before.buckets[0]
        assert np.shares_memory(second.buckets[0], before.buckets[0])
    assert len(engine.sets) == 2, "released memory is used for every later version"


class CopyingStore(LocalStore):
    """A store as other processes see it: what is put is copied."""

    async def put(self, value: Any) -> Any:
        return value.copy()


async def test_another_rank_shares_the_rows_it_exported_and_uses_their_memory_again() -> None:
    made, engine = await started(1, 2, store=CopyingStore())
    for version in (2, 3):
        assert await made.export(version) is None
        shared = await made.share(version)
        assert [spec.name for spec in shared.tensors] == ["t"]
        assert torch.equal(torch.from_numpy(shared.references[0]).view(torch.float32), torch.full((4,), version))
    assert len(engine.sets) == 1
    with pytest.raises(KeyError):
        await made.share(3)


@pytest.mark.parametrize("fails", [False, True])
async def test_another_rank_copies_no_further_version_out_while_one_is_being_shared(fails) -> None:
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
    await made.discard()  # the rank's thread is done with all that it was asked to do
    await settle()
    assert not following.done() and engine.calls.count("snapshot 3") == 0
    opened.set()
    await following
    with pytest.raises(OSError, match="full") if fails else contextlib.nullcontext():
        assert (await sharing).tensors
    assert len(engine.sets) == 1, "the memory is used again, also of what could not be put"


async def test_a_rank_that_holds_a_further_copy_of_the_weights_exports_nothing() -> None:
    made, engine = await started(1, 2, engine=Engine(1, spare=True))
    assert await made.export(2) is None
    assert engine.calls[-1] == "snapshot 2"
    with pytest.raises(KeyError):
        await made.share(2)


async def test_a_checkpoint_is_read_after_the_model_with_what_was_kept_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "update-000003"
    folder.mkdir()
    write_state(folder, State(ControlState(version=3), "qwen_image", "flow_grpo", {"optimizer_steps": 7}))
    _, engine = await started(0, 1, resume=str(folder))
    assert engine.calls == ["setup", "load update-000003 {'optimizer_steps': 7}"]


async def test_the_ranks_thread_is_free_while_a_checkpoint_is_written() -> None:
    made, engine = await started(0, 1)
    assert await made.begin_save("folder") == {"optimizer_steps": 7}
    written = asyncio.create_task(made.end_save())
    await made.step(1.0)
    assert not written.done()
    engine.saving.set_exception(OSError("no space left on device"))
    with pytest.raises(OSError, match="no space"):
        await written
