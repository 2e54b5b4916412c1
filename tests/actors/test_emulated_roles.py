"""Tests the emulated reward worker, rank and update rule in virtual time: what they fetch, how long they take, what
they hand on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
import numpy as np
import pytest
from actor_world import Desk, make_config, make_group

from omni_async.actors.api import Tracer
from omni_async.actors.emulated import EmulatedRank, EmulatedRewarder, EmulatedRule
from omni_async.actors.plan import plan_updates
from omni_async.config import Config
from omni_async.performance.emulation import SEED_BYTES, random_bytes, with_seed
from omni_async.performance.profile import Payload, Profile
from omni_async.performance.service import ServiceTime
from omni_async.simulation.virtual_time import VirtualClock, run
from omni_async.store import LocalStore
from omni_async.types import Prompt, ReadyGroup, ScoreJob, ScoreResult, TrainGroup
from omni_async.weights.digest import verify

PROFILE = Profile(
    name="p",
    source="a test",
    generate=ServiceTime(),
    score=ServiceTime(fixed_s=1.0, unit_s=0.5),
    proximal=ServiceTime(unit_s=0.25),
    train=ServiceTime(unit_s=1.0),
    step=ServiceTime(fixed_s=2.0),
    export=ServiceTime(fixed_s=3.0),
    switch=ServiceTime(fixed_s=10.0),
    payload=Payload(trajectory=64, media=32, weights=2_500_000),
)


class Store(LocalStore):
    """A store that takes its own time to fetch, and records what was fetched."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.fetched: list[Any] = []

    async def get(self, reference: Any) -> Any:
        await asyncio.sleep(self.seconds)
        self.fetched.append(reference)
        return reference


def times(desk: Desk, kind: str) -> list[tuple[float, float]]:
    return [(span.start, span.end) for span in desk.spans if span.kind == kind]


def jobs(group: int, count: int, first: int = 0) -> list[ScoreJob]:
    media = random_bytes(32, 0)
    return [
        ScoreJob(f"g{group}.s{i}", "train", Prompt(0, "a cat"), with_seed(media, 100 * group + i))
        for i in range(first, first + count)
    ]


def score(*batches: list[ScoreJob], store: Store | None = None, **changes: Any) -> Desk:
    desk = Desk()

    async def main() -> None:
        clock = VirtualClock()
        rewarder = EmulatedRewarder("reward-0", make_config(**changes), PROFILE, desk, store or Store(), clock)
        scoring = asyncio.ensure_future(rewarder.run())
        for count, batch in enumerate(batches, start=1):
            desk.offer(*batch)
            await desk.until(lambda wanted=count: len(desk.scored_batches) == wanted)
        desk.close()
        await scoring

    run(main())
    return desk


def results(desk: Desk) -> list[ScoreResult]:
    return [result for batch in desk.scored_batches for result in batch]


def test_scoring_fetches_its_media_and_takes_the_profiles_time_in_all() -> None:
    batches = jobs(0, 4), jobs(0, 1, 4)
    desk = score(*batches, store=(store := Store(seconds=0.4)))
    assert times(desk, "score") == [(0.0, 3.0), (3.0, 4.5)]
    assert len(store.fetched) == 5
    assert [result.sample_id for result in results(desk)] == [f"g0.s{i}" for i in range(5)]


def test_rewards_are_functions_of_the_seed_on_the_media() -> None:
    rewards = [result.score.value for result in results(score(jobs(0, 4), jobs(1, 4), jobs(0, 4))) if result.score]
    assert rewards[:4] == rewards[8:]
    assert len(set(rewards[:8])) == 8
    assert all(0 <= reward < 1 for reward in rewards)


def test_media_without_a_seed_cannot_be_scored() -> None:
    short = msgspec.structs.replace(jobs(0, 1)[0], media=np.zeros(SEED_BYTES - 1, np.uint8))
    (result,) = results(score([short]))
    assert result.score is None
    assert result.error == "ValueError: emulated media has at least 8 bytes, got 7"


def test_a_shared_device_is_handed_over_before_the_first_batch_of_an_update() -> None:
    batches = jobs(0, 2), jobs(1, 2), jobs(2, 2)  # two groups per update
    desk = score(*batches, **{"placement.colocated": True, "staleness.max_updates": 0})
    assert times(desk, "switch") == [(0.0, 10.0), (14.0, 24.0)]
    assert times(desk, "score") == [(10.0, 12.0), (12.0, 14.0), (24.0, 26.0)]
    assert times(score(*batches), "switch") == []


def trajectories(count: int = 4, size: int = 64) -> list[Any]:
    return [np.zeros(size, np.uint8) for _ in range(count)]


GROUP = TrainGroup(3, 0, None, (), (), ())


async def seconds(work: Coroutine[Any, Any, Any]) -> float:
    before = asyncio.get_running_loop().time()
    await work
    return asyncio.get_running_loop().time() - before


def test_a_pass_fetches_the_group_and_takes_the_profiles_time_for_a_ranks_share() -> None:
    async def main() -> None:
        store = Store(seconds=0.3)
        rank = EmulatedRank(make_config(**{"trainer.workers": 2}), PROFILE, store)
        await rank.setup(None, None)
        assert await seconds(rank.fetch(3, trajectories(), 0)) == pytest.approx(0.3)
        assert await seconds(rank.accumulate(GROUP, 1.0)) == pytest.approx(2.0 - 0.3), (
            "the fetch is part of the pass that follows it"
        )
        await rank.fetch(3, trajectories(), 0)
        assert await seconds(rank.recompute_proximal(GROUP)) == pytest.approx(0.5 - 0.3)
        assert await seconds(rank.accumulate(GROUP, 1.0)) == pytest.approx(2.0), "and of that alone"
        assert await seconds(rank.step(1.0)) == pytest.approx(2.0)
        assert len(store.fetched) == 8

    run(main())


def test_a_trajectory_of_another_size_is_an_error() -> None:
    async def main() -> None:
        rank = EmulatedRank(make_config(), PROFILE, Store())
        with pytest.raises(RuntimeError, match="group 3: a trajectory of 63 bytes arrived, expected 64"):
            await rank.fetch(3, trajectories(1, 63), 0)

    run(main())


def test_a_version_is_the_payload_in_buckets_and_no_two_are_the_same_bytes() -> None:
    async def main() -> None:
        rank = EmulatedRank(make_config(**{"weights.bucket_mb": 1}), PROFILE, Store())
        loop = asyncio.get_running_loop()
        exported: list[Any] = []
        for version in (0, 1):
            exported.append(await rank.export(version))
            assert loop.time() == pytest.approx(3.0 * (version + 1))
        manifests = []
        for version, snapshot in enumerate(exported):
            manifests.append(snapshot.manifest())
            assert (manifests[-1].version, manifests[-1].nbytes) == (version, 2_500_000)
            assert not np.shares_memory(snapshot.buckets[0], exported[1 - version].buckets[0])
            assert [len(bucket) for bucket in snapshot.buckets] == [2**20, 2**20, 2_500_000 - 2**21]
            verify(manifests[-1], snapshot.buckets)
        assert manifests[0].digest != manifests[1].digest
        exported[0].release()
        third = await rank.export(2)
        assert third is not None and third.buckets is exported[0].buckets, (
            "memory that nobody reads any more is used again"
        )
        assert third.manifest().digest not in (manifests[0].digest, manifests[1].digest)

    run(main())


def update(config: Config, groups: int) -> tuple[list[tuple[float, float]], Desk]:
    """Gives one update its groups, one every ten seconds from 10 on; returns (ready, taken over) of each, and the
    spans."""
    desk = Desk()

    async def main() -> list[tuple[float, float]]:
        loop, tracer = asyncio.get_running_loop(), Tracer("trainer", desk, VirtualClock())
        rule = EmulatedRule(config, plan_updates(config), EmulatedRank(config, PROFILE, Store()))
        made, times = rule.begin(5, tracer), []
        assert rule.state() == {}
        for number in range(groups):
            await asyncio.sleep(max(0.0, 10.0 * (number + 1) - loop.time()))
            assert made.missing == groups - number
            ready = loop.time()
            await made.add(_group(number))
            times.append((ready, loop.time()))
        assert made.missing == 0
        assert await made.finish() == {}
        assert [group.group for group in made.groups] == list(range(groups))
        await tracer.flush()
        return times

    return run(main()), desk


def _group(number: int) -> ReadyGroup:
    return make_group(number, [0.1, 0.2, 0.3, 0.4], trajectories())


def test_a_plan_that_streams_trains_every_group_when_it_comes() -> None:
    passed, desk = update(make_config(), 2)
    assert passed == [(10.0, 14.0), (20.0, 24.0)]
    assert times(desk, "train") == [(10.0, 14.0), (20.0, 24.0), (24.0, 26.0)]
    of = ({"group": 0}, {"group": 1}, {"step": 0})
    assert [span.args for span in desk.spans] == [{"version": 5, **what} for what in of]


def test_a_plan_that_collects_does_everything_at_the_end() -> None:
    changes = {"trainer.steps_per_update": 2, "algorithm.correction.mode": "none"}
    passed, desk = update(make_config(**changes), 2)
    assert passed == [(10.0, 10.0), (20.0, 20.0)]
    assert times(desk, "proximal") == [(20.0, 21.0), (21.0, 22.0)]
    assert times(desk, "train") == [(22.0, 26.0), (26.0, 28.0), (28.0, 32.0), (32.0, 34.0)]


@pytest.mark.parametrize("streaming", ["on", "off"])
def test_a_shared_device_is_handed_over_once_per_update(streaming: str) -> None:
    changes = {"placement.colocated": True, "staleness.max_updates": 0, "trainer.streaming": streaming}
    _, desk = update(make_config(**changes), 2)
    began = 10.0 if streaming == "on" else 20.0
    assert times(desk, "switch") == [(began, began + 10.0)]
