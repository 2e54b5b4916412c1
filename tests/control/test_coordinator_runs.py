"""Tests directed cases: whole runs of well-behaved roles at the edges of the configuration, and exact scenarios driven
call by call."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from control_world import (
    Bench,
    Run,
    digest_of,
    distinct,
    finish,
    hold,
    make_config,
    make_coordinator,
    make_prompts,
    make_result,
    now,
    play,
    report,
    score,
    started,
)
from msgspec.structs import replace

from omni_async.config.schema import Role
from omni_async.control.coordinator import Coordinator
from omni_async.control.versions import WeightMismatch
from omni_async.types import LedgerEntry, SampleRequest, Score, ScoreJob, ScoreResult, WeightReport


def trained(entries: list[Any]) -> list[Any]:
    return [entry for entry in entries if entry.event == "trained"]


# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("S", [0, 1, 4])
@pytest.mark.parametrize("P", [1, 3])
@pytest.mark.parametrize("updates", [1, 5])
def test_a_run_trains_exactly_what_was_asked(S: int, P: int, updates: int) -> None:
    run = play(make_config(S=S, P=P, updates=updates), seed=S + P)
    assert run.outcome == ("done", None)
    assert Counter(entry.event for entry in run.entries) == {"trained": updates * P}
    assert max(run.staleness) <= S
    assert [event["version"] for event in run.of_kind("update")] == list(range(1, updates + 1))


def test_the_worst_staleness_is_reached_and_not_passed() -> None:
    """Compares a trainer that is always ready first, which meets groups made just now, with one that lags, which meets
    groups exactly S updates old."""
    for max_updates in (1, 2, 4):
        lagging = play(
            make_config(S=max_updates, P=2, updates=12, max_inflight=16),
            seed=3,
            pause={"train": 60, "generate": 0, "score": 0},
        )
        assert max(lagging.staleness) == max_updates


def test_a_publish_of_every_s_plus_one_updates_is_live() -> None:
    for max_updates in range(4):
        run = play(make_config(S=max_updates, P=2, updates=7, publish_every=max_updates + 1), seed=max_updates)
        assert run.outcome == ("done", None)
        assert max(run.staleness) == max_updates
        assert run.coordinator.versions.held == 7, "the last version is published although it is not due"


def test_a_run_continues_from_a_version_with_fresh_group_numbers() -> None:
    run = play(make_config(S=1, P=2, updates=5), start_version=3, start_group=11, seed=2)
    assert run.outcome == ("done", None)
    assert [(entry.group, entry.trained_version) for entry in run.entries] == [(11, 4), (12, 4), (13, 5), (14, 5)]
    over = play(make_config(updates=3), start_version=3)
    assert over.outcome == ("done", None) and over.entries == []


def test_all_groups_rejected_ends_the_run_and_says_why() -> None:
    for max_updates, per_update in ((0, 1), (2, 3)):
        run = play(make_config(S=max_updates, P=per_update), reward=lambda job: 0.25)
        status, reason = run.outcome
        assert status == "failed"
        assert "zero reward variance" in reason and "in a row" in reason
        assert {entry.event for entry in run.entries} <= {"rejected", "dropped"}
        assert run.of_kind("ended")[0]["reasons"]["zero reward variance"] >= 4


def test_rejections_count_in_a_row_only_while_no_group_turns_out_well() -> None:
    """Rejects 57 groups in all, 19 between each two good ones; 32 in a row would end the run."""
    run = play(
        make_config(S=0, P=2, updates=2),
        reward=lambda job: distinct(job) if int(job.sample_id[1:].split(".")[0]) % 20 == 0 else 0.0,
    )
    assert run.outcome == ("done", None)
    assert [e.group for e in trained(run.entries)] == [0, 20, 40, 60]


def test_equal_rewards_are_trained_when_asked_for() -> None:
    run = play(make_config(drop_zero_variance=False), reward=lambda job: 0.25)
    assert run.outcome == ("done", None)


@pytest.mark.parametrize(("aggregate", "event"), [("rewards", "rejected"), ("advantages", None), ("gdpo", None)])
def test_scorers_that_cancel_out_are_signal_where_each_has_advantages_of_its_own(
    aggregate: str, event: str | None
) -> None:
    c, entries = make_coordinator(make_config(S=0, P=1, aggregate=aggregate))
    asyncio.run(hold(c, 0))
    asyncio.run(finish(c, "rollout-0", now(c.next_samples("rollout-0", 8, 8)), 0))
    jobs = now(c.next_to_score("reward-0", 8))
    results = [
        ScoreResult(job.sample_id, job.attempt, Score(1.0, values=values))
        for job, values in zip(jobs, ((1.0, 0.0), (0.0, 1.0)), strict=True)
    ]
    now(c.scored("reward-0", results))
    assert [entry.event for entry in entries] == ([] if event is None else [event])


def test_a_failing_reward_is_retried_and_then_rejects_the_group_with_its_reason() -> None:
    asked: Counter[str] = Counter()

    def reward(job: ScoreJob) -> float | str:
        asked[job.sample_id] += 1
        if job.sample_id == "g1.s0":
            return "HTTP 503"
        if job.sample_id == "g2.s0" and asked[job.sample_id] <= 2:
            return "HTTP 503"
        return distinct(job)

    run = play(make_config(score_retries=2), reward=reward)
    assert run.outcome == ("done", None)
    assert [(e.group, e.event, e.reason) for e in run.entries if e.event != "trained"] == [
        (1, "rejected", "reward failed 3 times: HTTP 503")
    ]
    assert asked["g1.s0"] == 3
    assert asked["g2.s0"] == 3
    assert all(e.reward == 0.5 for e in trained(run.entries)), "a failed score never becomes a number"


def test_a_failing_sample_is_made_again_from_the_same_seed_and_then_drops_its_group() -> None:
    def generate(engine: str, request: SampleRequest) -> str | None:
        hopeless = request.sample_id == "g1.s1"
        return "CUDA out of memory" if hopeless or (request.sample_id == "g2.s0" and request.attempt == 1) else None

    run = play(make_config(retries=2, engines=2), generate=generate)
    assert run.outcome == ("done", None)
    assert [(e.group, e.event, e.reason, e.attempts) for e in run.entries if e.event != "trained"] == [
        (1, "dropped", "generation failed 3 times: CUDA out of memory", 3)
    ]
    assert {e.group: e.attempts for e in trained(run.entries)}[2] == 2
    for sample_id in ("g1.s1", "g2.s0"):
        tries = [request for request in run.requests if request.sample_id == sample_id]
        assert [request.attempt for request in tries] == list(range(1, len(tries) + 1))
        assert len({(r.seed, r.initial_seed, r.window, r.prompt.index) for r in tries}) == 1
    assert len([r for r in run.requests if r.sample_id == "g1.s1"]) == 3


def test_what_is_generated_does_not_depend_on_engines_or_timing() -> None:
    def requests(engines: int, seed: int) -> dict[str, SampleRequest]:
        return {r.sample_id: r for r in play(make_config(S=2, engines=engines), seed=seed).requests}

    alone = requests(1, 0)
    for engines, seed in ((1, 1), (3, 2)):
        assert requests(engines, seed) == alone


# ---- validation ------------------------------------------------------------------------------------------------------


def test_validation_comes_first_at_every_multiple_and_last() -> None:
    run = play(make_config(S=1, P=1, updates=7, validation={"every": 3, "samples_per_prompt": 2}), validation_prompts=3)
    assert [event["version"] for event in run.of_kind("validation")] == [0, 3, 6, 7]
    assert all(event["failed"] == 0 and event["parts"] == {"reward": 0.5} for event in run.of_kind("validation"))
    requests = [r for r in run.requests if r.kind == "validation"]
    assert len(requests) == 4 * 3 * 2
    assert all(r.noise_level == 0 and r.window is None and r.fields == () for r in requests)
    first, last = ({r.sample_id.split(".", 1)[1]: r.seed for r in requests if r.group == version} for version in (0, 7))
    assert first == last, "rounds differ by the policy alone"


class ScoresValidationLast(Run):
    """A reward worker that keeps every validation sample until training is over."""

    async def rewarder(self, worker: str) -> None:
        kept: list[ScoreJob] = []
        while jobs := await self.coordinator.next_to_score(worker, 8):
            kept += [job for job in jobs if job.kind == "validation"]
            await score(self.coordinator, [job for job in jobs if job.kind == "train"], distinct)
            if self.coordinator.versions.trained == self.config.trainer.updates:
                await score(self.coordinator, kept, distinct)
                kept = []


def test_nothing_but_the_end_waits_for_validation() -> None:
    config = make_config(S=1, P=1, updates=3, validation={"every": 100})
    run = asyncio.run(ScoresValidationLast(config, reward_workers=1).play())
    assert [(e.kind, e.data.get("version")) for e in run.events] == [
        *(("update", version) for version in (1, 2, 3)),
        *(("validation", version) for version in (0, 3)),
        ("closing", None),
        ("ended", None),
    ]
    assert run.outcome == ("done", None)


def test_failed_validation_samples_are_counted_and_enter_no_mean() -> None:
    def reward(job: ScoreJob) -> float | str:
        return "HTTP 503" if job.kind == "validation" and job.sample_id.startswith("v0.p0") else distinct(job)

    def generate(engine: str, request: SampleRequest) -> str | None:
        return "CUDA out of memory" if request.sample_id == "v0.p1.s0" else None

    run = play(make_config(validation={"every": 100, "samples_per_prompt": 2}), reward=reward, generate=generate)
    assert run.outcome == ("done", None)
    first = run.of_kind("validation")[0]
    assert (first["failed"], first["parts"]) == (3, {"reward": 1.0})


def test_validation_without_prompts_does_not_hold_up_the_end() -> None:
    assert play(make_config(validation={"every": 1}), validation_prompts=0).outcome == ("done", None)


async def test_validation_says_which_versions_its_samples_started_with() -> None:
    c, _ = make_coordinator(make_config(S=1, P=1, validation={"every": 100}), validation_prompts=2)
    await hold(c, 0)
    requests = now(c.next_samples("rollout-0", 2, 4))
    assert [r.kind for r in requests] == ["validation", "validation"]
    c.versions.trained = 1
    for request, version in zip(requests, (0, 1), strict=True):
        await c.samples_done("rollout-0", [make_result(request, "rollout-0", (), version=version)])
    await score(c, now(c.next_to_score("reward-0", 2)), distinct)
    (event,) = await c.events()
    assert (event.data["version"], event.data["versions"]) == (0, [0, 1])


# ---- weights ---------------------------------------------------------------------------------------------------------


def ended(c: Coordinator) -> dict[str, Any]:
    return next(event.data for event in now(c.events()) if event.kind == "ended")


def lost(c: Coordinator) -> list[tuple[str, str]]:
    return [(event.data["name"], event.data["reason"]) for event in now(c.events()) if event.kind == "lost"]


def test_an_engine_with_wrong_weights_is_given_up_and_its_samples_are_made_by_others() -> None:
    for version, digest, part in (
        (0, "abc", "engine rollout-1 holds version 0 with digest abc, published was digest-0"),
        (5, digest_of(5), "engine rollout-1 holds version 5, which was never published (latest: 0)"),
    ):
        c, entries = make_coordinator(make_config(engines=2))
        asyncio.run(hold(c, 0, "rollout-0", "rollout-1"))
        taken = {request.sample_id for request in now(c.next_samples("rollout-1", 2, 2))}
        now(c.engine_holds(WeightReport("rollout-1", version, digest)))
        ((name, reason),) = lost(c)
        assert name == "rollout-1" and part in reason and not entries
        assert now(c.next_samples("rollout-1", 2, 2)) == []
        assert taken <= {request.sample_id for request in now(c.next_samples("rollout-0", 100, 100))}


def test_an_engine_that_goes_back_to_older_weights_is_given_up() -> None:
    c, _ = make_coordinator(make_config(engines=2))
    asyncio.run(hold(c, 0, "rollout-0", "rollout-1"))
    c.versions.trained = 1
    asyncio.run(hold(c, 1, "rollout-0"))
    now(c.engine_holds(WeightReport("rollout-0", 0, digest_of(0))))
    ((_, reason),) = lost(c)
    assert "went back from version 1 to 0" in reason


def test_a_report_of_an_engine_that_is_none_of_the_runs_changes_nothing() -> None:
    c, entries = make_coordinator(make_config(engines=2))
    asyncio.run(hold(c, 0, "rollout-0", "rollout-1"))
    now(c.engine_holds(WeightReport("rollout-7", 0, digest_of(0))))
    assert not entries and now(c.statistics())["engines"] == {"rollout-0": 0, "rollout-1": 0}


def test_samples_with_missing_or_impossible_versions_are_refused() -> None:
    c, _ = make_coordinator(make_config())
    asyncio.run(hold(c, 0))
    first, second = now(c.next_samples("rollout-0", 2, 2))
    with pytest.raises(ValueError, match="1 step versions for 2 trained steps"):
        now(c.samples_done("rollout-0", [make_result(first, "rollout-0", (0,))]))
    with pytest.raises(WeightMismatch, match="newest is 0"):
        now(c.samples_done("rollout-0", [make_result(second, "rollout-0", (0, 1))]))
    again = now(c.next_samples("rollout-0", 9, 9))
    assert {(one.sample_id, one.seed) for one in again if one.attempt == 2} == {
        (one.sample_id, one.seed) for one in (first, second)
    }


async def test_a_group_beyond_the_budget_ends_the_run_instead_of_being_trained() -> None:
    """Imitates a bug, since it cannot happen, by a trainer that is ahead of what it reported."""
    c, entries = await started(S=1, P=1)
    await finish(c, "rollout-0", now(c.next_samples("rollout-0", 8, 8)), 0)
    await score(c, now(c.next_to_score("reward-0", 8)), distinct)
    assert await c.next_groups(2, 1) == []
    assert "reached the trainer 2 updates old, the budget is 1" in ended(c)["reason"]
    assert {entry.event for entry in entries} == {"dropped"}


# ---- order -----------------------------------------------------------------------------------------------------------


async def test_a_trainer_waiting_for_a_group_that_is_rejected_gets_the_next_one_at_once() -> None:
    bench = Bench(S=3, P=1, updates=10, window=1)
    await bench.generate(1, 0)
    trainer = asyncio.create_task(bench.c.next_groups(0, 1))
    await asyncio.sleep(0)
    assert not trainer.done()
    await finish(bench.c, "rollout-0", bench.waiting.pop(0), 0)
    await score(bench.c, now(bench.c.next_to_score("reward-0", 100)), lambda job: 0.5)
    async with asyncio.timeout(1):
        (group,) = await trainer
    assert group.group == 1


@pytest.mark.parametrize("window", [2, 6])
def test_a_slow_group_is_overtaken_yet_trained_in_time(window: int) -> None:
    config = make_config(S=2, P=2, updates=10, window=window, engines=2, max_inflight=16)
    overtaken = 0
    for seed in range(6):
        run = play(config, seed=seed, pause={"generate": 12, "train": 2})
        assert run.outcome == ("done", None)
        assert max(run.staleness) <= 2
        order = [group.group for _, group in run.taken]
        overtaken += sum(a > b for a, b in pairwise(order))
    assert overtaken > 0


def test_engines_share_a_short_queue_evenly_and_one_that_has_its_share_gets_one_more_at_a_time() -> None:
    for group_size, engines, leased in ((3, 4, [3, 3, 3, 3]), (2, 2, [4, 1, 1, 1])):
        c, _ = make_coordinator(make_config(S=0, P=4, group_size=group_size, engines=engines))
        asyncio.run(hold(c, 0, *(f"rollout-{i}" for i in range(engines))))
        asking = range(4) if engines == 4 else (0, 0, 0, 0)
        assert [len(now(c.next_samples(f"rollout-{i}", 16, 16))) for i in asking] == leased


# ---- answers that come twice, late or from elsewhere -----------------------------------------------------------------


def reserved(c: Coordinator) -> int:
    return int(now(c.statistics())["buffers"]["trajectories"]["reserved"])


# ---- ends ------------------------------------------------------------------------------------------------------------


async def test_stopping_sends_every_waiter_home_at_once() -> None:
    c, _ = make_coordinator(make_config(engines=2))
    waiters = [
        asyncio.create_task(work)
        for work in (
            c.next_samples("rollout-0", 1, 1),
            c.next_samples("rollout-1", 1, 1),
            c.next_to_score("reward-0", 1),
            c.next_groups(0, 1),
            c.events(),
        )
    ]
    await asyncio.sleep(0)
    assert not any(waiter.done() for waiter in waiters)
    await c.stop("ctrl-c")
    async with asyncio.timeout(1):
        *answers, events = await asyncio.gather(*waiters)
    assert answers == [[], [], [], []]
    over = [(e.kind, e.data["status"], e.data["reason"]) for e in events]
    assert over == [("closing", "interrupted", "ctrl-c"), ("ended", "interrupted", "ctrl-c")]
    assert await c.next_samples("rollout-0", 1, 1) == [] and await c.next_groups(0, 1) == []


INTERRUPTED = ("dropped", "run interrupted: ctrl-c")


async def test_an_update_under_way_when_the_run_is_stopped_is_still_made() -> None:
    """Checks that its groups are not in the ledger as dropped: its optimizer steps are in the checkpoint that
    follows."""
    bench = Bench(S=1, P=1, updates=3)
    await bench.generate(0, 0)
    group = bench.take()
    assert group is not None
    await bench.c.stop("ctrl-c")
    assert bench.entries == [], "the trainer has not answered for its update"
    await bench.c.update_done(report(1, [group]))
    assert [(e.group, e.event, e.reason) for e in bench.entries] == [(0, "trained", None), (1, *INTERRUPTED)]
    counters = {"admitted": 2, "trained": 1, "rejected": 0, "dropped": 1, "live": 0}
    events = await bench.c.events()
    assert [e.kind for e in events[-3:]] == ["closing", "update", "ended"]
    assert events[-1].data["conservation"] == counters and events[-1].data["status"] == "interrupted"
    assert await bench.c.next_groups(1, 1) == []
    await bench.c.conclude()
    assert [e.kind for e in await bench.c.events()] == ["concluded"]
    assert bench.c.ledger.counters() == counters


@pytest.mark.parametrize("how", ["asks for more", "is gone"])
async def test_an_update_that_will_not_be_made_is_dropped(how: str) -> None:
    bench = Bench(S=1, P=2, updates=3)
    await bench.generate(0, 0)
    assert bench.take() is not None, "the first of two"
    await bench.c.stop("ctrl-c")
    assert bench.entries == [], "the trainer has not answered for it"
    if how == "asks for more":
        assert await bench.c.next_groups(0, 1) == []
    else:
        await bench.c.conclude()
    assert {(e.group, e.event, e.reason) for e in bench.entries} == {
        (g, *INTERRUPTED) for g in range(bench.c.ledger.admitted)
    }
    assert [e.kind for e in await bench.c.events()][:2] == ["closing", "ended"]
    await bench.c.update_done(report(1, []))
    assert bench.c.ledger.counters()["trained"] == 0


async def test_nothing_is_said_after_the_end() -> None:
    c, _ = make_coordinator(make_config(validation={"every": 1}), validation_prompts=1)
    await hold(c, 0)
    (request,) = await c.next_samples("rollout-0", 1, 8)
    assert request.kind == "validation"
    await finish(c, "rollout-0", [request], 0)
    jobs = await c.next_to_score("reward-0", 1)
    await c.fail("engine rollout-0 crashed")
    await score(c, jobs, distinct)
    await hold(c, 0)
    await c.stop("ctrl-c")
    events = [(e.kind, e.data["status"], e.data["reason"]) for e in await c.events()]
    assert events == [(kind, "failed", "engine rollout-0 crashed") for kind in ("closing", "ended")]


async def test_roles_that_finish_before_the_run_did_have_failed() -> None:
    c, _ = make_coordinator(make_config())
    await c.conclude()
    closing, ended, concluded = await c.events()
    assert (closing.kind, ended.data["status"], concluded.kind) == ("closing", "failed", "concluded")


# ---- events ----------------------------------------------------------------------------------------------------------


async def test_an_update_event_carries_what_a_person_wants_to_see() -> None:
    c, entries = await started(S=1, P=1, updates=2)
    requests = now(c.next_samples("rollout-0", 2, 8))
    await c.samples_done("rollout-0", [make_result(r, "rollout-0", (0, 0)) for r in requests])
    jobs = now(c.next_to_score("reward-0", 8))
    results = [
        ScoreResult(j.sample_id, j.attempt, Score(v, {"ocr": v / 2}, text="HI"))
        for j, v in zip(jobs, (1.0, 3.0), strict=True)
    ]
    await c.scored("reward-0", results)
    (group,) = now(c.next_groups(0, 1))
    assert group.rewards == [1.0, 3.0] and group.oldest_version == 0
    await c.update_done(report(1, [group]))
    (event,) = await c.events()
    assert event.kind == "update"
    expected = {"version": 1, "reward": 2.0, "parts": {"ocr": 1.0}, "staleness": [0]}
    assert {key: event.data[key] for key in expected} == expected
    assert event.data["conservation"] == {"admitted": 2, "trained": 1, "rejected": 0, "dropped": 0, "live": 1}
    assert [image.media for image in event.shown] == ["media g0.s0", "media g0.s1"]
    assert event.shown[0].score.text == "HI" and event.shown[0].prompt.text.startswith("prompt ")
    (entry,) = entries
    assert (entry.run, entry.group, entry.event) == ("run-1", 0, "trained")
    assert (entry.reward, entry.step_versions) == (2.0, (0, 0))
    assert (entry.admitted_version, entry.trained_version, entry.staleness, entry.attempts) == (0, 1, 0, 1)


def test_training_samples_carry_the_fields_the_objective_asked_for() -> None:
    c, _ = make_coordinator(make_config(validation={"every": 1, "share": 0.5}))
    now(c.require_fields(("latents", "means")))
    asyncio.run(hold(c, 0))
    fields = {r.kind: r.fields for _ in range(4) for r in now(c.next_samples("rollout-0", 2, 4))}
    assert fields == {"train": ("latents", "means"), "validation": ()}


async def test_a_ledger_that_cannot_be_written_ends_the_run_whoever_ended_the_group() -> None:
    """Rejects a group through a reward worker's message: the worker has done nothing wrong, and no group may stay
    behind for it."""

    def full(_: LedgerEntry) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    synced: list[int] = []
    c = Coordinator(
        make_config(S=1, P=1), "run-1", make_prompts(5), make_prompts(2), full, None, lambda: synced.append(1)
    )
    await hold(c, 0)
    await finish(c, "rollout-0", now(c.next_samples("rollout-0", 2, 2)), 0)
    await score(c, now(c.next_to_score("reward-0", 2)), lambda _: 0.5)
    assert await c.next_groups(0, 1) == []
    end = ended(c)
    assert end["status"] == "failed" and "the ledger cannot be written: [Errno 28] No space left" in end["reason"]
    assert end["conservation"]["live"] == 0
    await c.continuation()
    assert synced, "lines that a checkpoint counts are safe before it returns"


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
    run = asyncio.run(Restless(config, seed=seed).play())
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


@pytest.fixture
def coordinator() -> Coordinator:
    config = replace(make_config(), roles=(Role(name="judge"), Role(name="cache")))
    return make_coordinator(config)[0]


async def test_whoever_asks_before_a_worker_is_ready_gets_those_of_its_role_when_one_is(
    coordinator: Coordinator,
) -> None:
    asking = asyncio.ensure_future(coordinator.addresses("judge"))
    await coordinator.service_ready("cache-0", "here:1")
    for _ in range(3):
        await asyncio.sleep(0)
    assert not asking.done(), "that is another role's"
    await coordinator.service_ready("judge-1", "here:2")
    assert await asking == {"judge-1": "here:2"}
    await coordinator.service_lost("judge-1")
    await coordinator.service_lost("judge-1")
    await coordinator.service_ready("judge-1.2", "")
    assert await coordinator.addresses("judge") == {"judge-1.2": ""}
    told = [event.data["text"] for event in await coordinator.events()]
    assert told == ["cache-0: ready at here:1", "judge-1: ready at here:2", "judge-1.2: ready"]
    assert now(coordinator.statistics())["addresses"] == {"cache-0": "here:1", "judge-1.2": ""}
    with pytest.raises(ValueError, match=r"one of \['judge', 'cache'\], got 'jugde'"):
        await coordinator.addresses("jugde")


async def test_nobody_waits_once_the_run_is_over(coordinator: Coordinator) -> None:
    asking = asyncio.ensure_future(coordinator.addresses("judge"))
    await asyncio.sleep(0)
    await coordinator.stop("by its user")
    assert await asking == {} == await coordinator.addresses("judge")
