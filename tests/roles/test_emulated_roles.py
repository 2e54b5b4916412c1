"""Tests the emulated reward worker, rank and update rule in virtual time: what they fetch, how long they take, what
they hand on. tests/e2e/test_emulated.py and tests/simulation/test_real_roles.py hold whole runs of them to the law."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
import numpy as np
import pytest

from omni_async.performance.emulation import SEED_BYTES, random_bytes, with_seed
from omni_async.performance.profile import Payload, Profile, ServiceTime
from omni_async.roles.api import Tracer
from omni_async.roles.emulated import EmulatedRank, EmulatedRewarder, EmulatedRule
from omni_async.roles.plan import plan_updates
from omni_async.simulation.virtual_time import VirtualClock
from omni_async.store import LocalStore
from omni_async.types import Prompt, ScoreJob, TrainGroup
from omni_async.weights.digest import verify
from tests.roles.actor_world import Desk, make_config, make_group

pytestmark = pytest.mark.virtual_time
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


def times(desk: Desk, kind: str, began: float) -> list[tuple[float, float]]:
    return [(span.start - began, span.end - began) for span in desk.spans if span.kind == kind]


async def seconds(work: Coroutine[Any, Any, Any]) -> float:
    before = asyncio.get_running_loop().time()
    await work
    return asyncio.get_running_loop().time() - before


async def test_scoring_fetches_its_media_takes_the_profiles_time_in_all_and_needs_a_seed_on_the_media() -> None:
    desk, store, clock = Desk(), Store(seconds=0.4), VirtualClock()
    rewarder = EmulatedRewarder("reward-0", make_config(), PROFILE, desk, store, clock)
    scoring, began = asyncio.ensure_future(rewarder.run()), clock.now()
    media = [with_seed(random_bytes(32, 0), i) for i in range(4)]
    jobs = [ScoreJob(f"g0.s{i}", "train", Prompt(0, "a cat"), one, sample=i) for i, one in enumerate(media)]
    short = msgspec.structs.replace(jobs[0], sample_id="g0.s4", media=np.zeros(SEED_BYTES - 1, np.uint8))
    for count, batch in enumerate((jobs, [short]), start=1):
        desk.offer(*batch)
        await desk.until(lambda wanted=count: len(desk.scored_batches) == wanted)
    desk.close()
    await scoring
    assert times(desk, "score", began) == [(0.4, 3.0)]  # the rest of the time was fetching
    assert len(store.fetched) == 5 and [*desk.scores] == [f"g0.s{i}" for i in range(5)]
    *rewards, wrong = (result.score and result.score.value for result in desk.scores.values())
    assert len(set(rewards)) == 4 and all(0 <= reward < 1 for reward in rewards)
    assert wrong is None
    assert desk.scores["g0.s4"].error == "ValueError: emulated media has at least 8 bytes, got 7"


def trajectories(count: int = 4, size: int = 64) -> list[Any]:
    return [np.zeros(size, np.uint8) for _ in range(count)]


GROUP = TrainGroup(3, 0, None, (), (), ())


async def test_a_pass_fetches_the_group_of_the_profiles_size_and_takes_its_time_for_a_ranks_share() -> None:
    store = Store(seconds=0.3)
    rank = EmulatedRank(make_config(**{"trainer.workers": 2}), PROFILE, store)
    await rank.setup(None, None)
    assert await seconds(rank.fetch(3, trajectories(), 0)) == pytest.approx(0.3)
    assert await seconds(rank.accumulate(GROUP, 1.0)) == pytest.approx(2.0 - 0.3), "the fetch is part of that pass"
    await rank.fetch(3, trajectories(), 0)
    assert await seconds(rank.recompute_proximal(GROUP)) == pytest.approx(0.5 - 0.3)
    assert await seconds(rank.accumulate(GROUP, 1.0)) == pytest.approx(2.0), "and of that alone"
    assert await seconds(rank.step(1.0)) == pytest.approx(2.0)
    assert len(store.fetched) == 8
    with pytest.raises(RuntimeError, match="group 3: a trajectory of 63 bytes arrived, expected 64"):
        await rank.fetch(3, trajectories(1, 63), 0)


async def test_a_version_is_the_payload_in_buckets_and_no_two_are_the_same_bytes() -> None:
    rank = EmulatedRank(make_config(**{"weights.bucket_mb": 1}), PROFILE, Store())
    began = asyncio.get_running_loop().time()
    first, second = [await rank.export(version) for version in (0, 1)]
    assert asyncio.get_running_loop().time() - began == pytest.approx(2 * 3.0)
    manifests = [first.manifest(), second.manifest()]
    for version, snapshot in enumerate((first, second)):
        assert (manifests[version].version, manifests[version].nbytes) == (version, 2_500_000)
        assert [len(bucket) for bucket in snapshot.buckets] == [2**20, 2**20, 2_500_000 - 2**21]
        verify(manifests[version], snapshot.buckets)
    assert not np.shares_memory(first.buckets[0], second.buckets[0])
    first.release()
    third = await rank.export(2)
    assert third.buckets is first.buckets, "memory that nobody reads any more is used again"
    assert len({one.digest for one in (*manifests, third.manifest())}) == 3


COLLECTED = {"trainer.steps_per_update": 2, "algorithm.correction.mode": "none"}


@pytest.mark.parametrize(
    ("changes", "passed", "switch", "proximal", "train"),
    [
        pytest.param({}, [14, 24], 10, [], [(10, 14), (20, 24), (24, 26)], id="it streams"),
        pytest.param(
            COLLECTED, [10, 20], 20, [(20, 21), (21, 22)], [(22, 26), (26, 28), (28, 32), (32, 34)], id="it collects"
        ),
    ],
)
@pytest.mark.parametrize("shared", [False, True])
async def test_groups_are_passed_when_they_come_or_all_at_the_end_after_the_device_was_handed_over_once(
    changes, passed, switch, proximal, train, shared
) -> None:
    """Gives one update a group every ten seconds, from 10 on."""
    if shared:
        changes = changes | {"placement.colocated": True, "staleness.max_updates": 0}
    desk, loop, config = Desk(), asyncio.get_running_loop(), make_config(**changes)
    tracer, began = Tracer("trainer", desk, VirtualClock()), loop.time()
    rule = EmulatedRule(config, plan_updates(config), EmulatedRank(config, PROFILE, Store()))
    made, given = rule.begin(5, tracer), []
    for number in range(2):
        await asyncio.sleep(max(0.0, 10.0 * (number + 1) - (loop.time() - began)))
        assert made.missing == 2 - number
        await made.add(make_group(number, [0.1, 0.2, 0.3, 0.4], trajectories()))
        given.append(loop.time() - began)
    assert (made.missing, await made.finish(), rule.state()) == (0, {}, {})
    assert [group.group for group in made.groups] == [0, 1]
    await tracer.flush()
    assert times(desk, "switch", began) == ([(switch, switch + 10)] if shared else [])
    if not shared:
        assert given == passed
        assert (times(desk, "proximal", began), times(desk, "train", began)) == (proximal, train)
        of = ({"group": 0}, {"group": 1}, {"step": 0})
        streamed = [span.args for span in desk.spans] == [{"version": 5, **what} for what in of]
        assert streamed == (not proximal)
