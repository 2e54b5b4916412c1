"""Tests that a failed score is tried again after pauses that hold nobody else up and end with the run, and that scorers
that are wrong end the run before anything was scored, and not later."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import pytest
from control_world import Run, distinct, drawn, finish, make_config, score, started

from omni_async.control.coordinator import Coordinator
from omni_async.types import ScoreJob, ScoreResult


@pytest.mark.virtual_time
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_failed_score_is_tried_again_after_ever_longer_pauses_while_others_are_scored(at_once: bool) -> None:
    tries: dict[str, list[float]] = defaultdict(list)

    def reward(job: ScoreJob) -> float | str:
        tries[job.sample_id].append(asyncio.get_running_loop().time())
        return "HTTP 503" if job.sample_id in ("g1.s0", "g3.s1") else distinct(job)

    config = make_config(S=1, score_retries=3, backoff_s=0.5, score_at_once=at_once, window=2, updates=4)
    played = await Run(config, reward=reward).play()
    assert played.outcome == ("done", None)
    assert {(e.group, e.reason) for e in played.entries if e.event == "rejected"} == {
        (group, "reward failed 4 times: HTTP 503") for group in (1, 3)
    }
    assert all(e.reason is None for e in played.entries if e.event == "trained")
    for sample in ("g1.s0", "g3.s1"):
        first = tries[sample][0]
        assert [time - first for time in tries[sample]] == [0.0, 0.5, 1.5, 3.5]
    assert all(len(times) == 1 for sample, times in tries.items() if sample not in ("g1.s0", "g3.s1"))
    assert tries["g2.s0"][0] < tries["g1.s0"][1]


@pytest.mark.virtual_time
async def test_a_run_ends_without_waiting_for_retries() -> None:
    c, entries = await started(S=0, P=1, backoff_s=30.0)
    jobs = await drawn(c, 2)
    await c.scored("reward-0", [ScoreResult(job.sample_id, job.attempt, error="x") for job in jobs])
    asking, closing = asyncio.create_task(c.next_to_score("reward-0", 2)), asyncio.create_task(c.closing())
    await asyncio.sleep(1)
    assert not asking.done() and not closing.done()
    await c.stop("enough")
    assert await asking == []
    await closing
    await c.closing()
    assert [entry.event for entry in entries] == ["dropped"]
    await asyncio.sleep(100)  # nothing comes back
    assert asyncio.get_running_loop().time() == 101


@pytest.mark.virtual_time
async def test_a_retry_of_a_group_that_ended_meanwhile_does_not_come_back() -> None:
    c, entries = await started(S=0, P=1, score_retries=1, backoff_s=30.0)
    first, second = await drawn(c, 2)
    for job, pause_s in ((first, 20), (second, 15)):
        await c.scored("reward-0", [ScoreResult(job.sample_id, job.attempt, error="x")])
        await asyncio.sleep(pause_s)
    again = await c.next_to_score("reward-0", 2)  # at 35: the first one's pause ended at 30, the second's ends at 50
    assert [job.sample_id for job in again] == [first.sample_id]
    await c.scored("reward-0", [ScoreResult(first.sample_id, first.attempt, error="x")])
    assert [(entry.group, entry.reason) for entry in entries] == [(0, "reward failed 2 times: x")]
    await asyncio.sleep(60)
    requests = await c.next_samples("rollout-0", 2, 2)
    await finish(c, "rollout-0", requests, 0)
    jobs = await c.next_to_score("reward-0", 9)
    assert [job.sample_id for job in jobs] == [request.sample_id for request in requests]


async def test_a_postponed_score_costs_no_try() -> None:
    c, entries = await started(S=0, P=1, score_retries=0)
    await finish(c, "rollout-0", await c.next_samples("rollout-0", 2, 2), 0)
    for number in range(6):
        (job,) = await c.next_to_score("reward-0", 1)
        assert job.sample_id == f"g0.s{number % 2}", "the others are tried first"
        await c.scored("reward-0", [ScoreResult(job.sample_id, job.attempt, error="down", fault="outage")])
    assert entries == []
    (job,) = await c.next_to_score("reward-0", 1)
    await c.scored("reward-0", [ScoreResult(job.sample_id, job.attempt, error="unreadable")])
    assert [entry.reason for entry in entries] == ["reward failed 1 times: unreadable"]


async def fail(coordinator: Coordinator, job: ScoreJob, **how: bool) -> None:
    await coordinator.scored("reward-0", [ScoreResult(job.sample_id, job.attempt, error="misspelt", **how)])


async def closing(coordinator: Coordinator) -> tuple[str, str] | None:
    """Returns how the run ended, if it did."""
    await coordinator.phase("")  # so that there is an event to return
    ends = [event.data for event in await coordinator.events() if event.kind == "closing"]
    return (ends[0]["status"], ends[0]["reason"]) if ends else None


async def test_a_scorer_that_fails_its_trial_ends_the_run_with_its_words() -> None:
    coordinator, _ = await started()
    assert await coordinator.scorer_wrong("scorer 'x': AttributeError: y")
    assert await closing(coordinator) == ("failed", "scorer 'x': AttributeError: y")


async def test_but_not_once_a_sample_was_scored() -> None:
    coordinator, _ = await started()
    await score(coordinator, (await drawn(coordinator, 1)), distinct)
    assert not await coordinator.scorer_wrong("scorer 'x': AttributeError: y")
    assert await closing(coordinator) is None


@pytest.mark.parametrize("how", [{"wrong": True}, {"wrong": True, "fault": "outage"}, {"fault": "reject"}])
async def test_samples_of_four_groups_that_all_fail_end_the_run_and_those_of_one_do_not(how: dict[str, bool]) -> None:
    coordinator, _ = await started(S=1, P=2, group_size=2, score_retries=0, trajectories=64)
    jobs = await drawn(coordinator, 8)
    assert [job.sample_id for job in jobs[::2]] == ["g0.s0", "g1.s0", "g2.s0", "g3.s0"]
    for job in jobs[:6:2]:
        await fail(coordinator, job, **how)
        assert await closing(coordinator) is None
    await fail(coordinator, jobs[6], **how)
    status, reason = await closing(coordinator) or ("", "")
    assert status == "failed" and reason == "nothing could be scored so far, and the error stays the same: misspelt"


async def test_failures_that_do_not_repeat_end_nothing() -> None:
    coordinator, entries = await started(S=1, P=2, group_size=2, score_retries=0)
    for job in (await drawn(coordinator, 8))[::2]:
        await fail(coordinator, job)
    assert await closing(coordinator) is None and len(entries) == 4


async def test_one_score_is_enough_to_blame_the_samples() -> None:
    coordinator, entries = await started(S=1, P=2, group_size=2, score_retries=0)
    first, *others = await drawn(coordinator, 8)
    await score(coordinator, [first], distinct)
    for job in others[1::2]:
        await fail(coordinator, job, wrong=True)
    assert await closing(coordinator) is None and [entry.event for entry in entries] == ["rejected"] * 3


async def test_a_final_failure_is_not_tried_again_and_rejects_its_group_with_the_bare_reason() -> None:
    coordinator, entries = await started(score_retries=5)
    (job,) = await drawn(coordinator, 1)
    await fail(coordinator, job, fault="reject")
    assert [(entry.event, entry.reason) for entry in entries] == [("rejected", "misspelt")]


async def test_a_validation_round_goes_on_without_a_sample_of_absurd_reward() -> None:
    coordinator, _ = await started(score_retries=5, validation={"every": 1})
    bad, good = [job for job in await drawn(coordinator, 64) if job.kind == "validation"]
    await fail(coordinator, bad, fault="reject")
    await score(coordinator, [good], lambda job: 2.0)
    (validation,) = [event.data for event in await coordinator.events() if event.kind == "validation"]
    assert validation["parts"]["reward"] == 2.0 and validation["failed"] == 1
