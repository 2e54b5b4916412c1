"""Tests engines and reward workers that come and go, and objects that a dead process had stored: made again if nobody
has read them yet, returned by the trainer, and reported by the worker that wanted an image."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from omni_async.types import ReadyGroup, SampleRequest
from tests.control.control_world import Bench, distinct, now
from tests.support.patience import PATIENCE


def leased(**config: Any) -> Bench:
    """Begins a run whose one engine has leased all samples there are."""
    bench = Bench(**config)
    bench.lease()
    return bench


def made_again(requests: Iterable[SampleRequest], attempt: int = 2) -> dict[str, tuple[int, int]]:
    return {request.sample_id: (request.seed, attempt) for request in requests}


def attempts(requests: Iterable[SampleRequest]) -> dict[str, tuple[int, int]]:
    return {request.sample_id: (request.seed, request.attempt) for request in requests}


# ---- a store that is gone --------------------------------------------------------------------------------------------


async def test_what_the_trainer_has_not_taken_is_made_again_from_the_same_seeds() -> None:
    bench = leased(S=1, P=2)
    groups = {**bench.leased}
    bench.generate(0, 1)  # ready
    (taken,) = bench.take()
    bench.complete(groups[2][:1])  # scored
    bench.make(groups[2][1:])  # generated
    await bench.c.objects_lost("rollout-0")
    again = bench.lease()
    assert attempts(again) == made_again(groups[1] + groups[2]), "and neither group 0 nor what is being made"
    assert bench.take() == []
    bench.complete([request for request in again if request.group == 1])
    (second,) = bench.take()
    assert (taken.group, second.group) == (0, 1)
    bench.train([taken, second])
    assert [(entry.group, entry.event, entry.attempts) for entry in bench.entries] == [
        (0, "trained", 1),
        (1, "trained", 2),
    ]


async def test_losses_of_a_store_are_no_failures_of_the_sample() -> None:
    bench = leased(S=0, P=1, retries=0)
    requests = bench.leased[0]
    for attempt in range(2, 6):
        bench.complete(requests)
        await bench.c.objects_lost("rollout-0")
        assert attempts(bench.lease()) == made_again(requests, attempt)
    bench.complete(requests)
    assert len(bench.take()) == 1 and bench.entries == []


async def test_a_late_score_of_a_lost_image_does_not_count() -> None:
    bench = leased(S=0, P=1)
    bench.make(bench.leased[0])
    before = bench.jobs()
    await bench.c.objects_lost("rollout-0")
    bench.score(before)
    assert bench.take() == []
    bench.make(bench.lease())
    after = bench.jobs()  # the same worker has the new images
    bench.score(before)
    assert bench.take() == []
    bench.score(after, lambda job: 5 + distinct(job))
    assert [group.rewards for group in bench.take()] == [[5.0, 6.0]]


@pytest.mark.parametrize(("value", "failed"), [(2.0, 0), ("timeout", 1)])
async def test_a_sample_that_its_validation_round_is_done_with_is_not_made_again(
    value: float | str, failed: int
) -> None:
    """Has one that failed, too: made again it would be scored and counted as failed, or outlive its round."""
    bench = Bench(S=0, P=1, score_retries=0, validation={"every": 1})
    requests = [request for request in bench.lease() if request.kind == "validation"]
    bench.make(requests)
    (done,) = bench.jobs(1)
    bench.score([done], lambda job: value)
    await bench.c.objects_lost("rollout-0")
    again = bench.lease()
    assert attempts(again) == made_again(request for request in requests if request.sample_id != done.sample_id)
    bench.complete(again)
    assert [sum(round_["round"]["reasons"].values()) for round_ in bench.data("validation")] == [failed]
    assert bench.buffers()["trajectories"]["reserved"] == 2, "the training samples, which are leased"


# ---- a group that the trainer cannot read ----------------------------------------------------------------------------


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
    assert attempts(again) == made_again(first)
    bench.complete(again)
    state = await bench.c.continuation()
    assert state.unfinished == () and 0 in {one.group for one in state.ready}
    bench.train([other, *bench.take()])
    assert [(entry.group, entry.staleness) for entry in bench.entries] == [(1, 0), (0, 0)]
    bench.train(bench.take(2))
    assert [(entry.group, entry.staleness) for entry in bench.entries[2:]] == [(2, 1), (3, 1)]


async def test_a_group_that_is_lost_too_often_is_dropped_with_the_reason_and_another_takes_its_place() -> None:
    bench = leased(S=0, P=1, retries=1)
    requests = bench.leased[0]
    for _ in range(2):
        bench.complete(requests)
        bench.take()
        await bench.c.group_gone(0, "its node died")
        requests = bench.lease()
    assert bench.lines() == [(0, "dropped", "its trajectories were lost 2 times: its node died")]
    assert {(request.group, request.attempt) for request in requests} == {(1, 1)}
    bench.complete(requests)
    groups: list[ReadyGroup] = bench.take()
    bench.train(groups)
    assert bench.lines()[1:] == [(1, "trained", None)]


# ---- an image that is gone -------------------------------------------------------------------------------------------


async def test_a_sample_whose_image_is_gone_is_made_again_and_in_the_end_drops_its_group() -> None:
    """Allows no second try of a score: making the image again is none."""
    bench = leased(S=0, P=1, retries=1, score_retries=0)
    requests = bench.leased[0]
    bench.make(requests)
    first, second = bench.jobs()
    bench.fail(first, "its node died", fault="replace")
    bench.score([second])
    again = bench.lease()
    assert attempts(again) == made_again(requests[:1])
    bench.make(again)
    (first,) = bench.jobs()
    bench.fail(first, "its node died", fault="replace")
    assert bench.lines() == [(0, "dropped", "generation failed 2 times: its node died")]
    assert {request.group for request in bench.lease()} == {1}


# ---- those that leave in order ---------------------------------------------------------------------------------------


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


async def test_a_loss_is_told_once_and_the_weights_that_were_on_their_way_are_nobodys() -> None:
    bench = Bench(S=0, P=1, engines=2, holding=False)
    bench.hold(0, "rollout-0")
    for _ in range(2):
        await bench.c.engine_lost("rollout-1", "it did not take version 0: no memory")
    bench.hold(0, "rollout-1")
    assert bench.c.versions.held == 0 and bench.lease(8), "the run goes on"
    assert bench.data("lost") == [{"name": "rollout-1", "reason": "it did not take version 0: no memory"}]


# ---- whose fault -----------------------------------------------------------------------------------------------------


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


# ---- engines and reward workers that come and go ---------------------------------------------------------------------


async def test_a_lost_engine_that_had_asked_before_it_had_weights_gets_nothing_at_once() -> None:
    bench = Bench(S=0, P=1, engines=2, holding=False)
    asking = asyncio.create_task(bench.c.next_samples("rollout-0", 8, 8))
    await asyncio.sleep(0)
    await bench.c.engine_lost("rollout-0", "killed")
    assert await asyncio.wait_for(asking, PATIENCE) == []


async def test_the_late_answer_for_a_group_that_ended_frees_a_slot_for_an_engine_that_waits() -> None:
    bench = Bench(S=1, P=1, engines=2, retries=0, trajectories=2, max_inflight=1)
    (failing,), (late,) = bench.lease(1), bench.lease(1, "rollout-1")
    await bench.c.sample_failed("rollout-0", failing.sample_id, "out of memory")
    assert [(entry.group, entry.event) for entry in bench.entries] == [(0, "dropped")]
    (taken,) = bench.lease(1)
    asking = asyncio.create_task(bench.c.next_samples("rollout-0", 1, 2))
    await asyncio.sleep(0)
    assert not asking.done(), "one slot is the new sample's, the other that of the sample which nobody needs"
    bench.make([late], engine="rollout-1")
    (second,) = await asyncio.wait_for(asking, PATIENCE)
    assert (taken.group, second.group) == (1, 1)


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


async def test_the_last_version_is_validated_although_an_engine_is_lost_that_had_kept_it_back() -> None:
    """Loses an engine that also had the samples of another round, which ends without them."""
    validation = {"every": 1}
    bench = Bench(engines=2, S=0, P=1, updates=1, retries=0, validation=validation, validation_prompts=1)
    assert [request.kind for request in bench.lease(1, "rollout-1")] == ["validation"]
    bench.complete(bench.lease() + bench.lease())
    bench.train(bench.take())
    bench.hold(1, "rollout-0")
    await bench.c.engine_lost("rollout-1", "killed")
    assert bench.c.versions.held == 1 and not bench.c._closed, "its round is due"
    bench.complete(bench.lease(), lambda job: 1.0)
    assert [round_["version"] for round_ in bench.data("validation")] == [0, 1]
    assert bench.c._ending.outcome == ("done", None)
