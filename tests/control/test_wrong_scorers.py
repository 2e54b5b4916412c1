"""Tests how the coordinator treats scorers that are wrong: before anything was scored they end the run, and later they
do not."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from control_world import distinct, finish, hold, make_config, make_coordinator, score

from omni_async.control.coordinator import Coordinator
from omni_async.types import ScoreJob, ScoreResult


def play(work: Coroutine[Any, Any, None]) -> None:
    async def main() -> None:
        async with asyncio.timeout(10):
            await work

    asyncio.run(main())


async def generated(coordinator: Coordinator, count: int) -> list[ScoreJob]:
    """Generates so many drawn samples, with reward-0."""
    await hold(coordinator, 0)
    await finish(coordinator, "rollout-0", await coordinator.next_samples("rollout-0", count, count), 0)
    return await coordinator.next_to_score("reward-0", count)


async def fail(coordinator: Coordinator, job: ScoreJob, **how: bool) -> None:
    await coordinator.scored("reward-0", [ScoreResult(job.sample_id, job.attempt, error="misspelt", **how)])


async def closing(coordinator: Coordinator) -> tuple[str, str] | None:
    """Returns how the run ended, if it did."""
    await coordinator.phase("")  # so that there is an event to return
    ends = [event.data for event in await coordinator.events() if event.kind == "closing"]
    return (ends[0]["status"], ends[0]["reason"]) if ends else None


async def test_a_scorer_that_fails_its_trial_ends_the_run_with_its_words() -> None:
    coordinator, _ = make_coordinator(make_config())
    assert await coordinator.scorer_wrong("scorer 'x': AttributeError: y")
    assert await closing(coordinator) == ("failed", "scorer 'x': AttributeError: y")


async def test_but_not_once_a_sample_was_scored() -> None:
    coordinator, _ = make_coordinator(make_config())
    await score(coordinator, (await generated(coordinator, 1)), distinct)
    assert not await coordinator.scorer_wrong("scorer 'x': AttributeError: y")
    assert await closing(coordinator) is None


@pytest.mark.parametrize("how", [{"wrong": True}, {"wrong": True, "fault": "outage"}, {"fault": "reject"}])
async def test_samples_of_four_groups_that_all_fail_end_the_run_and_those_of_one_do_not(how: dict[str, bool]) -> None:
    coordinator, _ = make_coordinator(make_config(S=1, P=2, group_size=2, score_retries=0, trajectories=64))
    jobs = await generated(coordinator, 8)
    assert [job.sample_id for job in jobs[::2]] == ["g0.s0", "g1.s0", "g2.s0", "g3.s0"]
    for job in jobs[:6:2]:
        await fail(coordinator, job, **how)
        assert await closing(coordinator) is None
    await fail(coordinator, jobs[6], **how)
    status, reason = await closing(coordinator) or ("", "")
    assert status == "failed" and reason == "nothing could be scored so far, and the error stays the same: misspelt"


async def test_failures_that_do_not_repeat_end_nothing() -> None:
    coordinator, entries = make_coordinator(make_config(S=1, P=2, group_size=2, score_retries=0))
    for job in (await generated(coordinator, 8))[::2]:
        await fail(coordinator, job)
    assert await closing(coordinator) is None and len(entries) == 4


async def test_one_score_is_enough_to_blame_the_samples() -> None:
    coordinator, entries = make_coordinator(make_config(S=1, P=2, group_size=2, score_retries=0))
    first, *others = await generated(coordinator, 8)
    await score(coordinator, [first], distinct)
    for job in others[1::2]:
        await fail(coordinator, job, wrong=True)
    assert await closing(coordinator) is None and [entry.event for entry in entries] == ["rejected"] * 3


async def test_a_final_failure_is_not_tried_again_and_rejects_its_group_with_the_bare_reason() -> None:
    coordinator, entries = make_coordinator(make_config(score_retries=5))
    (job,) = await generated(coordinator, 1)
    await fail(coordinator, job, fault="reject")
    assert [(entry.event, entry.reason) for entry in entries] == [("rejected", "misspelt")]


async def test_a_validation_round_goes_on_without_a_sample_of_absurd_reward() -> None:
    coordinator, _ = make_coordinator(make_config(score_retries=5, validation={"every": 1}))
    bad, good = [job for job in await generated(coordinator, 64) if job.kind == "validation"]
    await fail(coordinator, bad, fault="reject")
    await score(coordinator, [good], lambda job: 2.0)
    (validation,) = [event.data for event in await coordinator.events() if event.kind == "validation"]
    assert validation["parts"]["reward"] == 2.0 and validation["failed"] == 1
