"""Tests `reward.streaming: false`: training samples are scored when none is being generated and none could be. Nothing
waits for ever."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from control_world import distinct, finish, hold, make_config, make_coordinator, make_result, now, play, score, started

from omni_async.control.coordinator import Coordinator
from omni_async.types import SampleRequest, ScoreJob


def jobs(c: Coordinator, limit: int = 100) -> list[ScoreJob]:
    """Returns the jobs that a reward worker gets now; none if it would have to wait."""
    try:
        return now(c.next_to_score("reward-0", limit))  # type: ignore[no-any-return]
    except AssertionError:
        return []


def make_in_step(**config: Any) -> tuple[Coordinator, list[Any]]:
    c, entries = make_coordinator(make_config(score_at_once=False, **config))
    now(hold(c, 0, *(f"rollout-{i}" for i in range(config.get("engines", 1)))))
    return c, entries


def done(c: Coordinator, *requests: SampleRequest) -> None:
    now(finish(c, "rollout-0", list(requests), 0))


async def test_samples_are_scored_when_the_last_one_is_generated() -> None:
    c, _ = make_in_step(S=0, P=2, group_size=2)
    requests = now(c.next_samples("rollout-0", 16, 16))
    for request in requests[:-1]:
        done(c, request)
        assert jobs(c) == []
    done(c, requests[-1])
    assert [job.sample_id for job in jobs(c, 3)] == ["g0.s0", "g0.s1", "g1.s0"]
    assert [job.sample_id for job in jobs(c, 3)] == ["g1.s1"]


async def test_a_full_buffer_is_scored_although_samples_wait_for_a_place() -> None:
    c, _ = make_in_step(S=0, P=2, group_size=2, trajectories=3)
    done(c, *now(c.next_samples("rollout-0", 16, 16)))
    first = jobs(c, 1)
    assert len(first) == 1
    now(score(c, first, distinct))
    assert jobs(c) == [], "there is a slot again, and a sample for it"
    done(c, *now(c.next_samples("rollout-0", 16, 16)))
    assert len(jobs(c)) == 3


async def test_a_waiting_reward_worker_is_woken_by_the_last_answer_even_if_that_is_a_failure() -> None:
    c, entries = await started(score_at_once=False, S=0, P=2, group_size=2, retries=0, updates=1)
    requests = await c.next_samples("rollout-0", 16, 16)
    await finish(c, "rollout-0", requests[:3], 0)
    worker = asyncio.create_task(c.next_to_score("reward-0", 8))
    await asyncio.sleep(0)
    await c.sample_failed("rollout-0", requests[3].sample_id, "boom")
    assert [(e.group, e.event) for e in entries] == [(1, "dropped")]
    await asyncio.sleep(0)
    assert not worker.done(), "group 2 replaces group 1"
    await finish(c, "rollout-0", await c.next_samples("rollout-0", 16, 16), 0)
    async with asyncio.timeout(1):
        assert {job.sample_id for job in await worker} == {"g0.s0", "g0.s1", "g2.s0", "g2.s1"}


async def test_validation_samples_are_scored_at_once_and_before_the_others() -> None:
    c, _ = make_coordinator(
        make_config(score_at_once=False, S=0, P=1, group_size=2, validation={"every": 1}), validation_prompts=2
    )
    now(hold(c, 0))
    requests = [r for _ in range(4) for r in now(c.next_samples("rollout-0", 1, 4))]
    by_kind = {kind: [r for r in requests if r.kind == kind] for kind in ("train", "validation")}
    assert Counter(r.kind for r in requests) == {"train": 2, "validation": 2}
    done(c, by_kind["train"][0])
    now(c.samples_done("rollout-0", [make_result(by_kind["validation"][0], "rollout-0", ())]))
    assert [job.kind for job in jobs(c)] == ["validation"]
    now(c.samples_done("rollout-0", [make_result(by_kind["validation"][1], "rollout-0", ())]))
    done(c, by_kind["train"][1])
    assert [job.kind for job in jobs(c, 2)] == ["validation", "train"]


def test_what_is_trained_without_staleness_does_not_depend_on_when_samples_are_scored() -> None:
    at_once, in_step = (
        play(make_config(S=0, P=3, updates=4, engines=2, score_at_once=streaming), seed=7).taken
        for streaming in (True, False)
    )
    assert at_once == in_step


@pytest.mark.parametrize("engines", [1, 30])
async def test_producers_that_asked_before_there_were_weights_all_get_work(engines: int) -> None:
    """Checks that an engine without weights takes nothing and keeps no other from it."""
    c, _ = make_coordinator(make_config(S=0, P=engines, group_size=1, engines=engines, groups=engines))
    names = [f"rollout-{i}" for i in range(engines)]
    producers = {name: asyncio.create_task(c.next_samples(name, 4, 4)) for name in names}
    await asyncio.sleep(0)
    for name in names:
        assert not any(task.done() for task in producers.values())
        await hold(c, 0, name)
        await asyncio.sleep(0)
    async with asyncio.timeout(1):
        leased = await asyncio.gather(*producers.values())
    assert [len(requests) for requests in leased] == [1] * engines
