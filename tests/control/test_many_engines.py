"""Tests many producers before one coordinator: none is forgotten, whichever leaves at whatever moment, and none
starves."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from control_world import Run, make_config, play

from omni_async.types import SampleRequest


class Restless(Run):
    """Producers that give up waiting at random moments, also between being woken and running, and ask again."""

    async def producer(self, engine: str) -> None:
        running: set[asyncio.Task[None]] = set()
        while True:
            asking = asyncio.create_task(self.coordinator.next_samples(engine, 2, 2))
            if self._random.random() < 0.7:
                await self.turns("generate")
                asking.cancel()
            try:
                leased: list[SampleRequest] = await asking
            except asyncio.CancelledError:
                continue
            if not leased:
                break
            running |= {asyncio.create_task(self.sample(engine, request)) for request in leased}
        await asyncio.gather(*running)


@pytest.mark.parametrize("seed", range(4))
def test_a_run_ends_although_its_producers_keep_going_away(seed: int) -> None:
    config = make_config(S=1, P=8, group_size=3, updates=4, engines=40, trajectories=24)

    async def main() -> Run:
        return await Restless(config, seed=seed).play()

    run = asyncio.run(main())
    assert run.outcome == ("done", None)
    assert Counter(entry.event for entry in run.entries) == {"trained": 32}
    assert len(run.requests) == len({request.sample_id for request in run.requests}) == 32 * 3, (
        "every sample was leased once"
    )


def test_engines_take_turns_where_there_is_less_work_than_engines() -> None:
    """Runs 60 engines, 12 samples at a time: with first come, first served each works a fifth of the time."""
    run = play(make_config(S=0, P=4, group_size=3, updates=30, engines=60, max_inflight=1), seed=3)
    assert run.outcome == ("done", None)
    leases = Counter(engine for engine, _ in run.leases)
    assert set(leases.values()) == {30 * 12 // 60}


def test_the_same_samples_are_made_by_one_engine_and_by_many() -> None:
    def requests(engines: int) -> dict[str, SampleRequest]:
        return {r.sample_id: r for r in play(make_config(S=1, P=4, updates=4, engines=engines)).requests}

    assert requests(50) == requests(1)
