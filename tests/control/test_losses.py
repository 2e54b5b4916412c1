"""Tests engines and reward workers that come and go, and objects that a dead process had stored."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from omni_async.types import SampleRequest
from tests.control.control_world import Bench, now
from tests.support.patience import PATIENCE


def leased(**config: Any) -> Bench:
    """Begins a run whose one engine has leased all samples there are."""
    bench = Bench(**config)
    bench.lease()
    return bench


def attempts(requests: Iterable[SampleRequest], attempt: int | None = None) -> dict[str, tuple[int, int]]:
    return {request.sample_id: (request.seed, attempt or request.attempt) for request in requests}


async def test_what_the_trainer_has_not_taken_is_made_again_from_the_same_seeds() -> None:
    bench = leased(S=1, P=2)
    groups = {**bench.leased}
    bench.generate(0, 1)  # ready
    (taken,) = bench.take()
    bench.complete(groups[2][:1])  # scored
    bench.make(groups[2][1:])  # generated
    await bench.c.objects_lost("rollout-0")
    again = bench.lease()
    assert attempts(again) == attempts(groups[1] + groups[2], 2), "and neither group 0 nor what is being made"
    assert bench.take() == []
    bench.complete([request for request in again if request.group == 1])
    bench.train([taken, *bench.take()])
    assert [(entry.group, entry.attempts) for entry in bench.entries] == [(0, 1), (1, 2)]


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("store", None),
        ("group", "its trajectories were lost 2 times: its node died"),
        ("image", "generation failed 2 times: its node died"),
    ],
)
async def test_only_lost_groups_and_images_count_and_in_the_end_drop_their_group(what: str, reason: str | None) -> None:
    """Allows no second try of a score; a regenerated image is not a second try."""
    bench = leased(S=0, P=1, retries=1, score_retries=0)
    again = bench.leased[0]
    for attempt in (2, 3):
        bench.make(lost := again)
        jobs = bench.jobs()
        if what == "image":
            bench.fail(jobs.pop(0), "its node died", fault="replace")
            lost = lost[:1]
        bench.score(jobs)
        if what == "group":
            assert bench.take()
            await bench.c.group_gone(0, "its node died")
        elif what == "store":
            await bench.c.objects_lost("rollout-0")
        again = bench.lease()
        if reason is None or attempt == 2:
            assert attempts(again) == attempts(lost, attempt)
    assert bench.lines() == ([] if reason is None else [(0, "dropped", reason)])
    assert {(request.group, request.attempt) for request in again} == {(0, 3) if reason is None else (1, 1)}


async def test_a_group_that_the_trainer_gives_back_is_taken_again_before_any_other() -> None:
    bench = leased(S=1, P=2)
    first = bench.leased[0]
    bench.generate(*range(4))
    _, other = bench.take(2)
    for group in (0, 2, 77):  # of which the trainer has the first alone
        await bench.c.group_gone(group, "its node died")
    state = await bench.c.continuation()
    assert [one.group for one in state.unfinished] == [0] and 0 not in {one.group for one in state.ready}
    assert bench.take() == [], "younger ones wait, so that no group comes later than it was admitted for"
    again = bench.lease()
    assert attempts(again) == attempts(first, 2)
    bench.complete(again)
    state = await bench.c.continuation()
    assert state.unfinished == () and 0 in {one.group for one in state.ready}
    bench.train([other, *bench.take()])
    bench.train(bench.take(2))
    assert [(entry.group, entry.staleness) for entry in bench.entries] == [(1, 0), (0, 0), (2, 1), (3, 1)]


async def test_workers_that_leave_get_no_work_at_once_and_their_answers_count() -> None:
    """Has them wait: they would hold their devices until there is work, or room for it."""
    bench = Bench(S=0, P=1, group_size=3, engines=2)
    mine, others = bench.lease(1), bench.lease(1, "rollout-1")
    bench.make(others, engine="rollout-1")
    jobs = bench.jobs()
    bench.lease(1, "rollout-1")
    c = bench.c
    asking = [asyncio.create_task(c.next_samples(f"rollout-{i}", 2, 2)) for i in (0, 1)]
    scoring = [asyncio.create_task(c.next_to_score(f"reward-{i}", 2)) for i in (0, 1)]
    await asyncio.sleep(0)
    await c.engine_leaves("rollout-0")
    await c.scorer_leaves("reward-0")
    assert await asyncio.wait_for(asking[0], PATIENCE) == await asyncio.wait_for(scoring[0], PATIENCE) == []
    assert not asking[1].done() and not scoring[1].done()
    await c.engine_lost("rollout-1", "killed")  # so that there is work
    assert now(c.next_samples("rollout-0", 2, 4)) == await asking[1] == [], "the one left, the other is gone"
    bench.make(mine)
    assert [job.sample_id for job in await scoring[1]] == [request.sample_id for request in mine]
    assert now(c.next_to_score("reward-0", 2)) == []
    bench.score(jobs)
    assert bench.buffers()["trajectories"]["reserved"] == 1, "the score counts"
    assert c.versions.knows("rollout-0"), "until it is reported as gone"


async def test_a_sample_that_reward_workers_die_of_is_rejected_in_the_end_and_takes_no_other_with_it() -> None:
    """Scores whole batches."""
    bench = Bench(S=0, P=4, score_retries=3)
    bench.make(bench.lease())
    worker, scored = 0, 0
    while scored < 7:
        jobs = bench.jobs(8, f"reward-{worker}")
        assert jobs, "somebody waits for ever"
        if any(job.sample_id == "g1.s1" for job in jobs):
            await bench.c.scorer_lost(f"reward-{worker}")
            worker += 1
        else:
            bench.score(jobs, who=f"reward-{worker}")
            scored += len(jobs)
    assert bench.lines() == [(1, "rejected", "its scoring was cut off 4 times: reward-3 was lost")]


async def test_a_sample_that_takes_its_scorer_down_again_and_again_is_rejected_in_the_end() -> None:
    bench = Bench(S=0, P=1, score_retries=1)
    bench.make(bench.lease())
    bench.c._samples.faults.record_score("reward-0")
    for _ in range(2):
        assert not bench.entries
        (job,) = [job for job in bench.jobs(2) if job.sample_id == "g0.s0"]
        bench.fail(job, "connection reset", fault="outage")
    assert [entry.reason for entry in bench.entries] == ["its scoring was cut off 2 times: connection reset"]


async def test_an_outage_is_held_against_no_sample_however_many_workers_meet_it_with_the_same() -> None:
    """Has little to score, so that a sample that one worker has put back goes to the next."""
    bench = Bench(S=0, P=1, score_retries=1)
    bench.make(bench.lease(1))

    def goes_down(worker: str) -> None:
        (job,) = bench.jobs(1, worker)
        bench.fail(job, "connection reset", worker, fault="outage")

    for number in range(8):
        bench.c._samples.faults.record_score(f"reward-{number}")
        goes_down(f"reward-{number}")
    assert not bench.entries
    for number in range(8):  # it is back: one worker after the other has an answer for the sample it knows, and asks
        bench.c._samples.faults.end_outage(f"reward-{number}")
    goes_down("reward-5")
    reasons = [entry.reason for entry in bench.entries]
    assert reasons == ["its scoring was cut off 2 times: connection reset"], "when all was well"


async def test_what_a_lost_reward_worker_had_is_scored_by_others_first_and_one_by_one() -> None:
    bench = Bench(S=1, P=2)
    bench.make(bench.lease())
    lost = bench.jobs(3)
    await bench.c.scorer_lost("reward-0")
    batches = [bench.jobs(4, "reward-1") for _ in range(4)]
    again = [job for batch in batches for job in batch]
    assert [len(batch) for batch in batches] == [1, 1, 1, 4], "any of the three may be why the worker is gone"
    assert [job.sample_id for job in again][:3] == [job.sample_id for job in lost]
    bench.score(lost)
    assert bench.buffers()["trajectories"]["reserved"] == 8, "late scores of the lost worker count for nothing"
    assert now(bench.c.next_to_score("reward-0", 4)) == [], "and it gets no more"
