"""Tests engines and reward workers that come and go, and objects that a dead process had stored: made again if nobody
has read them yet, returned by the trainer, and reported by the worker that wanted an image."""

from __future__ import annotations

import asyncio

import pytest
from control_world import (
    digest_of,
    distinct,
    drawn,
    finish,
    hold,
    make_config,
    make_coordinator,
    now,
    report,
    score,
    started,
)

from omni_async.control.coordinator import Coordinator
from omni_async.types import LedgerEntry, ReadyGroup, SampleRequest, ScoreJob, ScoreResult, WeightReport


async def begin(**config: int) -> tuple[Coordinator, list[LedgerEntry], dict[int, list[SampleRequest]]]:
    """Begins a run whose one engine has leased all samples there are; returns the requests of each group."""
    c, entries = await started(**config)
    groups: dict[int, list[SampleRequest]] = {}
    for request in await c.next_samples("rollout-0", 100, 100):
        groups.setdefault(request.group, []).append(request)
    return c, entries, groups


async def complete(c: Coordinator, requests: list[SampleRequest]) -> None:
    await finish(c, "rollout-0", requests, 0)
    await score(c, await c.next_to_score("reward-0", len(requests)), distinct)


def nothing_to_take(c: Coordinator) -> bool:
    try:
        now(c.next_groups(0, 1))
    except AssertionError:
        return True
    return False


def gone(job: ScoreJob) -> tuple[str, list[ScoreResult]]:
    return "reward-0", [ScoreResult(job.sample_id, job.attempt, error="its node died", fault="replace")]


def down(job: ScoreJob) -> ScoreResult:
    return ScoreResult(job.sample_id, job.attempt, error="connection reset", fault="outage")


def attempts(requests: list[SampleRequest]) -> dict[str, tuple[int, int]]:
    return {request.sample_id: (request.seed, request.attempt) for request in requests}


# ---- a store that is gone --------------------------------------------------------------------------------------------


async def test_what_the_trainer_has_not_taken_is_made_again_from_the_same_seeds() -> None:
    c, entries, groups = await begin(S=1, P=2)
    await complete(c, groups[0])
    await complete(c, groups[1])  # ready
    (taken,) = await c.next_groups(0, 1)
    await complete(c, groups[2][:1])  # scored
    await finish(c, "rollout-0", groups[2][1:], 0)  # generated
    await c.objects_lost("rollout-0")
    again = await c.next_samples("rollout-0", 100, 100)
    assert attempts(again) == {r.sample_id: (r.seed, 2) for r in groups[1] + groups[2]}, (
        "and neither group 0 nor what is being made"
    )
    assert nothing_to_take(c)
    await complete(c, [r for r in again if r.group == 1])
    (second,) = await c.next_groups(0, 1)
    assert (taken.group, second.group) == (0, 1)
    await c.update_done(report(1, [taken, second]))
    assert [(entry.group, entry.event, entry.attempts) for entry in entries] == [(0, "trained", 1), (1, "trained", 2)]


async def test_losses_of_a_store_are_no_failures_of_the_sample() -> None:
    c, entries, groups = await begin(S=0, P=1, retries=0)
    requests = groups[0]
    for attempt in range(2, 6):
        await complete(c, requests)
        await c.objects_lost("rollout-0")
        requests = await c.next_samples("rollout-0", 100, 100)
        assert {request.attempt for request in requests} == {attempt}
    await complete(c, requests)
    assert len(await c.next_groups(0, 1)) == 1 and entries == []


async def test_a_late_score_of_a_lost_image_does_not_count() -> None:
    c, _, groups = await begin(S=0, P=1)
    await finish(c, "rollout-0", groups[0], 0)
    before = await c.next_to_score("reward-0", 2)
    await c.objects_lost("rollout-0")
    await score(c, before, distinct)
    assert nothing_to_take(c)
    await finish(c, "rollout-0", await c.next_samples("rollout-0", 100, 100), 0)
    after = await c.next_to_score("reward-0", 2)  # the same worker has the new images
    await score(c, before, distinct)
    assert nothing_to_take(c)
    await score(c, after, lambda job: 5 + distinct(job))
    (group,) = await c.next_groups(0, 1)
    assert group.rewards == [5.0, 6.0]


@pytest.mark.parametrize(("value", "failed"), [(2.0, 0), ("timeout", 1)])
async def test_a_sample_that_its_validation_round_is_done_with_is_not_made_again(
    value: float | str, failed: int
) -> None:
    """Has one that failed, too: made again it would be scored and counted as failed, or outlive its round."""
    c, _ = await started(S=0, P=1, score_retries=0, validation={"every": 1})
    requests = [r for r in await c.next_samples("rollout-0", 100, 100) if r.kind == "validation"]
    await finish(c, "rollout-0", requests, 0)
    done, *_ = await c.next_to_score("reward-0", 1)
    await score(c, [done], lambda job: value)
    await c.objects_lost("rollout-0")
    again = await c.next_samples("rollout-0", 100, 100)
    assert attempts(again) == {r.sample_id: (r.seed, 2) for r in requests if r.sample_id != done.sample_id}
    await finish(c, "rollout-0", again, 0)
    await score(c, await c.next_to_score("reward-0", 100), distinct)
    (round_,) = [event.data for event in await c.events() if event.kind == "validation"]
    assert round_["failed"] == failed
    assert now(c.statistics())["buffers"]["trajectories"]["reserved"] == 2, "the training samples, which are leased"


# ---- a group that the trainer cannot read ----------------------------------------------------------------------------


async def test_a_group_that_the_trainer_gives_back_is_taken_again_before_any_other() -> None:
    c, entries, groups = await begin(S=1, P=2)
    for number in range(4):
        await complete(c, groups[number])
    taken = {group.group: group for group in await c.next_groups(0, 2)}
    await c.group_gone(0, "its node died")
    assert nothing_to_take(c), "younger ones wait, so that no group comes later than it was admitted for"
    again = await c.next_samples("rollout-0", 100, 100)
    assert attempts(again) == {r.sample_id: (r.seed, 2) for r in groups[0]}
    await complete(c, again)
    (back,) = await c.next_groups(0, 1)
    await c.update_done(report(1, [taken[1], back]))
    assert [(entry.group, entry.staleness) for entry in entries] == [(1, 0), (0, 0)]
    later = await c.next_groups(1, 2)
    await c.update_done(report(2, later))
    assert [(entry.group, entry.staleness) for entry in entries[2:]] == [(2, 1), (3, 1)]


async def test_a_checkpoint_has_a_group_that_was_given_back_as_unfinished_or_ready() -> None:
    c, _, groups = await begin(S=0, P=1)
    await complete(c, groups[0])
    await c.next_groups(0, 1)
    await c.group_gone(0, "its node died")
    state = await c.continuation()
    assert ([one.group for one in state.unfinished], state.ready) == ([0], ())
    await complete(c, await c.next_samples("rollout-0", 100, 100))
    state = await c.continuation()
    assert (state.unfinished, [one.group for one in state.ready]) == ((), [0])


async def test_a_group_that_is_lost_too_often_is_dropped_with_the_reason_and_another_takes_its_place() -> None:
    c, entries, groups = await begin(S=0, P=1, retries=1)
    requests = groups[0]
    for _ in range(2):
        await complete(c, requests)
        await c.next_groups(0, 1)
        await c.group_gone(0, "its node died")
        requests = await c.next_samples("rollout-0", 100, 100)
    assert [(entry.event, entry.reason) for entry in entries] == [
        ("dropped", "its trajectories were lost 2 times: its node died")
    ]
    assert {(r.group, r.attempt) for r in requests} == {(1, 1)}
    await complete(c, requests)
    groups_taken: list[ReadyGroup] = await c.next_groups(0, 1)
    assert await c.update_done(report(1, groups_taken))


async def test_a_group_that_the_trainer_does_not_have_cannot_be_given_back() -> None:
    c, entries, groups = await begin(S=0, P=1, retries=0)
    await complete(c, groups[0])
    await c.group_gone(0, "its node died")
    await c.group_gone(77, "its node died")
    assert entries == [] and not nothing_to_take(c)


# ---- an image that is gone -------------------------------------------------------------------------------------------


async def test_a_sample_whose_image_is_gone_is_made_again_and_not_scored_again() -> None:
    c, _, groups = await begin(S=0, P=1, retries=1, score_retries=0)
    await finish(c, "rollout-0", groups[0], 0)
    first, second = await c.next_to_score("reward-0", 2)
    await c.scored(*gone(first))
    await score(c, [second], distinct)
    again = await c.next_samples("rollout-0", 100, 100)
    assert attempts(again) == {groups[0][0].sample_id: (groups[0][0].seed, 2)}
    await complete(c, again)
    assert len(await c.next_groups(0, 1)) == 1


async def test_images_that_are_gone_too_often_drop_the_group() -> None:
    c, entries, groups = await begin(S=0, P=1, retries=1)
    requests = groups[0]
    for _ in range(2):
        await finish(c, "rollout-0", requests, 0)
        job, *_ = await c.next_to_score("reward-0", 2)  # of the same sample
        await c.scored(*gone(job))
        requests = await c.next_samples("rollout-0", 100, 100)
    assert [(entry.event, entry.reason) for entry in entries] == [
        ("dropped", "generation failed 2 times: its node died")
    ]
    assert {request.group for request in requests} == {1}


# ---- those that leave in order ---------------------------------------------------------------------------------------


async def test_an_engine_that_leaves_gets_no_work_and_its_answers_count() -> None:
    c, _ = await started(S=0, P=2, engines=2)
    mine = await c.next_samples("rollout-0", 2, 4)
    await c.next_samples("rollout-1", 100, 100)
    asking = asyncio.create_task(c.next_samples("rollout-0", 2, 4))
    await asyncio.sleep(0)
    await c.engine_leaves("rollout-0")
    await c.engine_lost("rollout-1", "killed")  # so that there is work
    assert await asking == [] and now(c.next_samples("rollout-0", 2, 4)) == []
    await finish(c, "rollout-0", mine, 0)
    assert {job.sample_id for job in await c.next_to_score("reward-0", 8)} == {request.sample_id for request in mine}
    assert c.versions.knows("rollout-0"), "until it is reported as gone"


async def test_a_reward_worker_that_leaves_gets_no_work_and_its_scores_count() -> None:
    c, _, groups = await begin(S=0, P=1)
    await finish(c, "rollout-0", groups[0][:1], 0)
    jobs = await c.next_to_score("reward-0", 2)
    asking = asyncio.create_task(c.next_to_score("reward-0", 2))
    await asyncio.sleep(0)
    await c.scorer_leaves("reward-0")
    await finish(c, "rollout-0", groups[0][1:], 0)
    assert await asking == [] and now(c.next_to_score("reward-0", 2)) == []
    await score(c, jobs, distinct)
    await score(c, await c.next_to_score("reward-1", 2), distinct, "reward-1")
    assert len(await c.next_groups(0, 1)) == 1


async def test_a_loss_is_told_once_and_the_weights_that_were_on_their_way_are_nobodys() -> None:
    c, _ = make_coordinator(make_config(S=0, P=1, engines=2))
    await hold(c, 0, "rollout-0")
    for _ in range(2):
        await c.engine_lost("rollout-1", "it did not take version 0: no memory")
    await c.engine_holds(WeightReport("rollout-1", 0, digest_of(0)))
    assert c.versions.held == 0 and await c.next_samples("rollout-0", 8, 8), "the run goes on"
    lost = [event.data for event in await c.events() if event.kind == "lost"]
    assert lost == [{"name": "rollout-1", "reason": "it did not take version 0: no memory"}]


# ---- while a score is tried again ------------------------------------------------------------------------------------


@pytest.mark.virtual_time
async def test_a_retry_of_an_image_that_is_lost_meanwhile_does_not_come_back() -> None:
    """Ends the retry's pause when the sample made anew waits for its score, or is being scored."""
    for taken in (False, True):
        c, entries = await started(S=0, P=1, backoff_s=10.0)
        first, second = await drawn(c, 2)
        await c.scored("reward-0", [ScoreResult(first.sample_id, 1, error="timeout")])
        await score(c, [second], distinct)
        await c.objects_lost("rollout-0")
        await finish(c, "rollout-0", await c.next_samples("rollout-0", 2, 2), 0)
        jobs = await c.next_to_score("reward-0", 2) if taken else []
        await asyncio.sleep(60)
        jobs = jobs or await c.next_to_score("reward-0", 2)
        assert [job.attempt for job in jobs] == [2, 2]
        await score(c, jobs, distinct)
        (group,) = await c.next_groups(0, 1)
        assert group.group == 0 and not entries


# ---- whose fault -----------------------------------------------------------------------------------------------------


async def test_a_sample_that_reward_workers_die_of_is_rejected_in_the_end() -> None:
    c, entries = await started(S=0, P=1, score_retries=2)
    await finish(c, "rollout-0", await c.next_samples("rollout-0", 2, 2), 0)
    for number in range(3):
        assert not entries
        await c.next_to_score(f"reward-{number}", 1)
        await c.scorer_lost(f"reward-{number}")
    assert [(entry.event, entry.reason) for entry in entries] == [
        ("rejected", "its scoring was cut off 3 times: reward-2 was lost")
    ]


async def test_a_sample_that_reward_workers_die_of_takes_no_other_with_it() -> None:
    """Scores whole batches."""
    c, entries = await started(S=0, P=4, score_retries=3)
    await finish(c, "rollout-0", await c.next_samples("rollout-0", 8, 8), 0)
    worker, scored = 0, []
    while len(scored) < 7:
        jobs = await c.next_to_score(f"reward-{worker}", 8)
        if any(job.sample_id == "g1.s1" for job in jobs):
            await c.scorer_lost(f"reward-{worker}")
            worker += 1
        else:
            await score(c, jobs, distinct, f"reward-{worker}")
            scored += jobs
    assert [(entry.group, entry.event) for entry in entries] == [(1, "rejected")]
    assert worker == 4, "workers that died of it"


async def test_a_sample_that_takes_its_scorer_down_again_and_again_is_rejected_in_the_end() -> None:
    c, entries = await started(S=0, P=1, score_retries=1)
    await finish(c, "rollout-0", await c.next_samples("rollout-0", 2, 2), 0)
    c._samples.blame.scores("reward-0")
    for _ in range(2):
        assert not entries
        (job,) = [job for job in await c.next_to_score("reward-0", 2) if job.sample_id == "g0.s0"]
        await c.scored("reward-0", [down(job)])
    assert [entry.reason for entry in entries] == ["its scoring was cut off 2 times: connection reset"]


async def test_an_outage_is_held_against_no_sample_however_many_workers_meet_it_with_the_same() -> None:
    """Has little to score, so that a sample that one worker has put back goes to the next."""
    c, entries = await started(S=0, P=1, score_retries=1)
    await finish(c, "rollout-0", await c.next_samples("rollout-0", 1, 1), 0)

    async def goes_down(worker: str) -> None:
        (job,) = await c.next_to_score(worker, 1)
        await c.scored(worker, [down(job)])

    for number in range(8):
        c._samples.blame.scores(f"reward-{number}")
        await goes_down(f"reward-{number}")
    assert not entries
    for number in range(8):  # it is back: one worker after the other has an answer for the sample it knows, and asks
        c._samples.blame.asks(f"reward-{number}")
    await goes_down("reward-5")
    assert [entry.reason for entry in entries] == ["its scoring was cut off 2 times: connection reset"], (
        "when all was well"
    )


# ---- engines and reward workers that come and go ---------------------------------------------------------------------


async def test_the_samples_of_a_lost_engine_are_made_again_from_the_same_seeds() -> None:
    c, _ = await started(engines=2, S=1, P=2)
    lost = await c.next_samples("rollout-0", 4, 4)
    await c.engine_lost("rollout-0", "killed")
    again = await c.next_samples("rollout-1", 8, 8)
    seeds = {request.sample_id: request.seed for request in again}
    assert {request.sample_id: request.seed for request in lost}.items() <= seeds.items()
    assert {request.attempt for request in again if request.sample_id in {one.sample_id for one in lost}} == {2}
    await finish(c, "rollout-0", lost, 0)  # still on their way when it died
    assert await c.continuation() and not c._samples.statistics()["ready"], "its late answers count for nothing"


async def test_a_lost_engine_that_had_asked_gets_nothing() -> None:
    c, _ = await started(engines=2, S=0, P=1)
    first = await c.next_samples("rollout-1", 8, 8) + await c.next_samples("rollout-1", 8, 8)
    asking = asyncio.create_task(c.next_samples("rollout-0", 8, 8))
    await asyncio.sleep(0)
    await c.engine_lost("rollout-0", "killed")
    await c.engine_lost("rollout-1", "killed")
    assert await asking == [], "its call is answered, by nobody's loss"
    await c.engine_joins("rollout-2")
    joining = asyncio.create_task(c.next_samples("rollout-2", 8, 8))
    await asyncio.sleep(0)
    assert not joining.done(), "without weights it gets no work"
    await c.engine_holds(WeightReport("rollout-2", 0, digest_of(0)))
    assert {r.sample_id for r in await joining} == {r.sample_id for r in first}


async def test_the_late_answer_for_a_group_that_ended_frees_a_slot_for_an_engine_that_waits() -> None:
    c, entries = await started(S=1, P=1, engines=2, retries=0, trajectories=2, max_inflight=1)
    (failing,) = now(c.next_samples("rollout-0", 1, 1))
    (late,) = now(c.next_samples("rollout-1", 1, 1))
    await c.sample_failed("rollout-0", failing.sample_id, "out of memory")
    assert [(entry.group, entry.event) for entry in entries] == [(0, "dropped")]
    (taken,) = now(c.next_samples("rollout-0", 1, 2))
    asking = asyncio.create_task(c.next_samples("rollout-0", 1, 2))
    await asyncio.sleep(0)
    assert not asking.done(), "one slot is the new sample's, the other that of the sample which nobody needs"
    await finish(c, "rollout-1", [late], 0)
    (second,) = await asyncio.wait_for(asking, 1)
    assert (taken.group, second.group) == (1, 1)


async def test_what_a_lost_reward_worker_had_is_scored_by_others_first_and_one_by_one() -> None:
    c, _ = await started(S=1, P=2)
    lost = await drawn(c, 8, 3)
    await c.scorer_lost("reward-0")
    batches = [await c.next_to_score("reward-1", 4) for _ in range(4)]
    again = [job for batch in batches for job in batch]
    assert [len(batch) for batch in batches] == [1, 1, 1, 4], "any of the three may be why the worker is gone"
    assert [job.sample_id for job in again][:3] == [job.sample_id for job in lost]
    await score(c, lost, distinct, "reward-0")
    assert now(c.statistics())["buffers"]["trajectories"]["reserved"] == 8, (
        "late scores of the lost worker count for nothing"
    )
    assert await c.next_to_score("reward-0", 4) == [], "and it gets no more"
    await c.scored("reward-1", [ScoreResult(job.sample_id, job.attempt, error="x") for job in again])


async def test_the_last_version_is_validated_although_an_engine_is_lost_that_had_kept_it_back() -> None:
    """Loses an engine that also had the samples of another round, which ends without them."""
    c, _ = make_coordinator(
        make_config(engines=2, S=0, P=1, updates=1, retries=0, validation={"every": 1}), validation_prompts=1
    )
    await hold(c, 0, "rollout-0", "rollout-1")
    first = await c.next_samples("rollout-1", 1, 8)
    assert [request.kind for request in first] == ["validation"]
    await finish(c, "rollout-0", await c.next_samples("rollout-0", 8, 8) + await c.next_samples("rollout-0", 8, 8), 0)
    await score(c, await c.next_to_score("reward-0", 8), distinct)
    await c.update_done(report(1, await c.next_groups(0, 1)))
    await hold(c, 1, "rollout-0")
    await c.engine_lost("rollout-1", "killed")
    assert c.versions.held == 1 and not c._closed, "its round is due"
    await finish(c, "rollout-0", await c.next_samples("rollout-0", 8, 8), 1)
    await score(c, await c.next_to_score("reward-0", 8), lambda job: 1.0)
    events = await c.events()
    assert [event.data["version"] for event in events if event.kind == "validation"] == [0, 1]
    assert c._ending.outcome == ("done", None)


async def test_workers_that_wait_hear_at_once_that_they_are_not_needed() -> None:
    """Removes workers while there is no work, or no room for it: they would hold their devices until there is."""
    c, _ = await started(S=0, P=1, engines=2)
    for engine in ("rollout-0", "rollout-1"):
        await c.next_samples(engine, 2, 2)
    waiting = [asyncio.create_task(c.next_samples(f"rollout-{i}", 2, 2)) for i in (0, 1)]
    scoring = [asyncio.create_task(c.next_to_score(f"reward-{i}", 2)) for i in (0, 1)]
    await asyncio.sleep(0)
    await c.engine_leaves("rollout-1")
    await c.scorer_leaves("reward-1")
    assert await asyncio.wait_for(waiting[1], 1) == [] and await asyncio.wait_for(scoring[1], 1) == []
    assert not waiting[0].done() and not scoring[0].done()
    await c.stop("enough")
    await asyncio.gather(*waiting, *scoring)
