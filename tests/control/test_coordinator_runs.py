"""Tests exact scenarios, most of them driven call by call."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest
from msgspec.structs import replace

from omni_async.aio.clock import ManualClock
from omni_async.config.schema import Role
from omni_async.control.coordinator import Coordinator
from omni_async.control.requests import RequestFactory
from omni_async.control.versions import WeightMismatch
from omni_async.types import LedgerEntry, Score, ScoreJob, ScoreResult, WeightReport
from tests.control.control_world import (
    Bench,
    Run,
    digest_of,
    distinct,
    make_config,
    make_coordinator,
    make_prompts,
    make_result,
    now,
    number_of,
    play,
)

# ---- groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", [0.25, None])
def test_rejections_count_in_a_row_only_while_no_group_turns_out_well(reward: float | None) -> None:
    """Rejects all groups, or 57 in all, 19 between each two good ones; 32 in a row end the run."""
    run = play(
        make_config(S=0, P=2, updates=2),
        reward=lambda job: distinct(job) if reward is None and number_of(job.sample_id) % 20 == 0 else 0.25,
    )
    status, reason = run.outcome
    if reward is None:
        assert status == "done"
        assert [entry.group for entry in run.entries if entry.event == "trained"] == [0, 20, 40, 60]
    else:
        assert status == "failed" and "zero reward variance" in str(reason) and "in a row" in str(reason)


@pytest.mark.parametrize(
    ("config", "event"),
    [
        ({"aggregate": "rewards"}, "rejected"),
        ({"aggregate": "advantages"}, None),
        ({"aggregate": "gdpo"}, None),
        ({"drop_zero_variance": False}, None),
    ],
)
def test_scorers_that_cancel_out_may_be_signal(config: dict[str, Any], event: str | None) -> None:
    bench = Bench(S=0, P=1, **config)
    bench.make(bench.lease())
    values = zip(bench.jobs(), ((1.0, 0.0), (0.0, 1.0)), strict=True)
    results = [ScoreResult(job.sample_id, 1, score=Score(1.0, values=value)) for job, value in values]
    now(bench.c.scored("reward-0", results))
    assert [entry.event for entry in bench.entries] == ([] if event is None else [event])


def test_training_does_not_depend_on_when_samples_are_scored() -> None:
    at_once, in_step = (
        play(make_config(S=0, P=3, engines=2, score_at_once=how), seed=7).taken for how in (True, False)
    )
    assert at_once == in_step


# ---- validation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "prompts"), [(1, [0]), (3, [0, 2, 4]), (5, [0, 1, 2, 4, 5]), (7, [*range(7)]), (9, [*range(7)])]
)
def test_a_limit_takes_prompts_from_the_whole_file(limit: int, prompts: list[int]) -> None:
    def seeds(version: int, **validation: Any) -> dict[int, int]:
        factory = RequestFactory(make_config(validation=validation))
        return {request.prompt.index: request.seed for request in factory.validation(version, tuple(make_prompts(7)))}

    limited, whole = seeds(3, limit=limit), seeds(0)
    assert list(limited) == prompts
    assert limited.items() <= whole.items(), "rounds differ by the policy alone"


def test_rounds_without_prompts_are_over_at_once() -> None:
    assert play(make_config(validation={"every": 1}), validation_prompts=0).outcome == ("done", None)


class ScoresValidationLast(Run):
    """A reward worker that keeps every validation sample until training is over."""

    async def rewarder(self, worker: str) -> None:
        kept: list[ScoreJob] = []
        while jobs := await self.coordinator.next_to_score(worker, 8):
            kept += [job for job in jobs if job.kind == "validation"]
            await self.score(worker, [job for job in jobs if job.kind == "train"])
            if self.coordinator.versions.trained == self.config.trainer.updates:
                await self.score(worker, kept)
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


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "digest", "reason"),
    [
        (0, "abc", "engine rollout-1 holds version 0 with digest abc, published was digest-0"),
        (5, digest_of(5), "engine rollout-1 holds version 5, which was never published (latest: 1)"),
        (0, digest_of(0), "went back from version 1 to 0"),
    ],
)
def test_an_engine_with_wrong_weights_is_given_up(version: int, digest: str, reason: str) -> None:
    bench = Bench(engines=2)
    taken = {request.sample_id for request in bench.lease(2, "rollout-1")}
    bench.c.versions.trained = 1
    bench.hold(1, "rollout-1" if "back" in reason else "rollout-0")
    now(bench.c.engine_holds(WeightReport("rollout-1", version, digest)))
    ((name, why),) = [(lost["name"], lost["reason"]) for lost in bench.data("lost")]
    assert name == "rollout-1" and reason in why and not bench.entries
    now(bench.c.engine_holds(WeightReport("rollout-1", 1, digest_of(1))))  # it was under way
    assert bench.lease(2, "rollout-1") == [] and "rollout-1" not in now(bench.c.statistics())["engines"]
    assert taken <= {request.sample_id for request in bench.lease()}


@pytest.mark.parametrize(
    ("kind", "steps", "versions", "problem"),
    [
        ("train", None, (0,), "of rollout-0: 1 step versions for 2 trained steps"),
        ("train", None, (0, 1), "newest is 0"),
        ("train", 3, (0, 0, 0), None),
        ("train", 3, (), None),
        ("train", 3, (0, 0), "2 step versions for 3 trained steps"),
        ("train", 3, (0, 0, 0, 0), "4 step versions for 3 trained steps"),
        ("train", 3, (0, 0, 1), "newest is 0"),
        ("validation", 3, (), None),
        ("validation", 3, (0, 0, 0), "3 step versions for 0 trained steps"),
    ],
)
def test_versions_of_a_sample(kind: str, steps: int | None, versions: tuple[int, ...], problem: str | None) -> None:
    """Without a window every step is trained on: that of a dataset's sample was taken by no version."""
    bench = Bench(P=1, S=0, steps=steps, validation={"every": 1})
    request = next(request for request in bench.lease() if request.kind == kind)
    done = bench.c.samples_done("rollout-0", [make_result(request, "rollout-0", versions)])
    if problem is None:
        now(done)
        assert [job.sample_id for job in bench.jobs()] == [request.sample_id]
        return
    with pytest.raises((ValueError, WeightMismatch), match=problem):
        now(done)
    (again,) = [again for again in bench.lease() if again.sample_id == request.sample_id]
    assert (again.seed, again.attempt) == (request.seed, 2)


async def test_a_group_beyond_the_budget_ends_the_run_instead_of_being_trained() -> None:
    """Imitates a bug, since it cannot happen, by a trainer that is ahead of what it reported."""
    bench = Bench(S=1, P=1)
    bench.generate(0, 1)
    bench.version = 2
    assert bench.take() == []
    assert "reached the trainer 2 updates old, the budget is 1" in bench.data("ended")[0]["reason"]
    assert {entry.event for entry in bench.entries} == {"dropped"}


# ---- ends ------------------------------------------------------------------------------------------------------------

INTERRUPTED = ("dropped", "run interrupted: ctrl-c")


async def test_an_update_under_way_when_the_run_is_stopped_is_still_made() -> None:
    bench = Bench(S=1, P=1, updates=3)
    bench.generate(0)
    groups = bench.take()
    await bench.c.stop("ctrl-c")
    assert bench.entries == [], "the trainer has not answered for its update"
    bench.train(groups)
    assert bench.lines() == [(0, "trained", None), (1, *INTERRUPTED)]
    counters = {"admitted": 2, "trained": 1, "rejected": 0, "dropped": 1, "live": 0}
    *_, closing, update, ended = bench.events()
    assert [closing.kind, update.kind, ended.kind] == ["closing", "update", "ended"]
    assert ended.data["conservation"] == counters and ended.data["status"] == "interrupted"
    assert bench.take() == []
    await bench.c.conclude()
    assert bench.events()[-1].kind == "concluded" and bench.c.ledger.counters() == counters


@pytest.mark.parametrize("how", ["asks for more", "is gone"])
async def test_an_update_that_will_not_be_made_is_dropped(how: str) -> None:
    bench = Bench(S=1, P=2, updates=3)
    bench.generate(0)
    assert bench.take(), "the first of two"
    await bench.c.stop("ctrl-c")
    assert bench.entries == [], "the trainer has not answered for it"
    if how == "asks for more":
        assert bench.take() == []
    else:
        await bench.c.conclude()
    assert sorted(bench.lines()) == [(group, *INTERRUPTED) for group in range(4)]
    assert [event.kind for event in bench.events()][:2] == ["closing", "ended"]
    bench.train([])
    assert bench.c.ledger.counters()["trained"] == 0


async def test_a_failure_is_the_last_event() -> None:
    bench = Bench()
    await bench.c.fail("engine rollout-0 crashed")
    bench.hold(0)
    await bench.c.stop("ctrl-c")
    events = [(e.kind, e.data["status"], e.data["reason"]) for e in bench.events()]
    assert events == [(kind, "failed", "engine rollout-0 crashed") for kind in ("closing", "ended")]


async def test_roles_that_finish_before_the_run_did_have_failed() -> None:
    bench = Bench(holding=False)
    await bench.c.conclude()
    closing, ended, concluded = bench.events()
    assert (closing.kind, ended.data["status"], concluded.kind) == ("closing", "failed", "concluded")


# ---- events ----------------------------------------------------------------------------------------------------------


def test_an_update_event_carries_what_a_person_wants_to_see() -> None:
    bench = Bench(S=1, P=1, updates=2)
    bench.make(bench.lease(2))
    scores = [Score(value, {"ocr": value / 2}, text="HI") for value in (1.0, 3.0)]
    jobs = zip(bench.jobs(), scores, strict=True)
    results = [ScoreResult(job.sample_id, 1, score=one, cached=1) for job, one in jobs]
    for _ in range(2):  # a second answer does not count
        now(bench.c.scored("reward-0", results))
    (group,) = groups = bench.take()
    assert group.rewards == [1.0, 3.0] and group.oldest_version == 0
    bench.train(groups)
    (event,) = bench.events()
    assert event.kind == "update"
    expected = {"version": 1, "reward": 2.0, "parts": {"ocr": 1.0}, "staleness": [0], "cached": 2}
    assert {key: event.data[key] for key in expected} == expected
    assert event.data["conservation"] == {"admitted": 2, "trained": 1, "rejected": 0, "dropped": 0, "live": 1}
    assert [image.media for image in event.shown] == ["media g0.s0", "media g0.s1"]
    assert event.shown[0].score.text == "HI" and event.shown[0].prompt.text.startswith("prompt ")
    (entry,) = bench.entries
    assert (entry.run, entry.group, entry.event) == ("run-1", 0, "trained")
    assert (entry.reward, entry.step_versions) == (2.0, (0, 0))
    assert (entry.admitted_version, entry.trained_version, entry.staleness, entry.attempts) == (0, 1, 0, 1)
    bench.generate(1)
    bench.train(bench.take())
    assert [update["cached"] for update in bench.data("update")] == [2, 0]


async def test_a_ledger_that_cannot_be_written_ends_the_run_whoever_ended_the_group() -> None:
    """Rejects a group through a reward worker's message: the worker has done nothing wrong."""

    def full(_: LedgerEntry) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    synced: list[int] = []
    bench = Bench(S=1, P=1, holding=False)
    prompts = make_prompts(5), make_prompts(2)
    bench.c = Coordinator(bench.config, "run-1", *prompts, full, None, lambda: synced.append(1), clock=ManualClock())
    bench.hold(0)
    bench.generate(0, values=lambda _: 0.5)
    assert bench.take() == []
    (end,) = bench.data("ended")
    assert end["status"] == "failed" and "the ledger cannot be written: [Errno 28] No space left" in end["reason"]
    assert end["conservation"]["live"] == 0
    await bench.c.continuation()
    assert synced, "lines that a checkpoint counts are safe before it returns"


# ---- addresses of services -------------------------------------------------------------------------------------------


async def test_credentials_are_in_no_message_no_status_and_no_line_of_the_ledger() -> None:
    bench = Bench(S=0, P=1, retries=0)
    await bench.c.phase("https://me:hunter2@h failed")
    await bench.c.service_ready("judge-0", "http://:hunter2@here:1")
    assert bench.data("phase") == [{"text": "https://***@h failed"}, {"text": "judge-0: ready at http://***@here:1"}]
    assert now(bench.c.statistics())["addresses"] == {"judge-0": "http://***@here:1"}
    (request, *_) = bench.lease()
    await bench.c.sample_failed("rollout-0", request.sample_id, "https://me:hunter2@h failed")
    ((_, _, reason),) = bench.lines()
    assert "https://***@h failed" in str(reason)
    assert "hunter2" not in repr([event.data for event in bench.events()])


async def test_whoever_asks_for_a_role_gets_its_ready_workers_once_there_is_one_or_none_once_the_run_is_over() -> None:
    c, _ = make_coordinator(replace(make_config(), roles=(Role(name="judge"), Role(name="cache"))))
    asking = asyncio.create_task(c.addresses("judge"))
    await c.service_ready("cache-0", "here:1")
    for _ in range(3):
        await asyncio.sleep(0)
    assert not asking.done(), "that is another role's"
    await c.service_ready("judge-1", "here:2")
    assert await asking == {"judge-1": "here:2"}
    await c.service_lost("judge-1")
    await c.service_lost("judge-1")
    await c.service_ready("judge-1.2", "")
    assert await c.addresses("judge") == {"judge-1.2": ""}
    told = [event.data["text"] for event in await c.events()]
    assert told == ["cache-0: ready at here:1", "judge-1: ready at here:2", "judge-1.2: ready"]
    assert now(c.statistics())["addresses"] == {"cache-0": "here:1", "judge-1.2": ""}
    with pytest.raises(ValueError, match=r"one of \['judge', 'cache'\], got 'jugde'"):
        await c.addresses("jugde")
    await c.service_lost("judge-1.2")
    asking = asyncio.create_task(c.addresses("judge"))
    await asyncio.sleep(0)
    await c.stop("by its user")
    assert await asking == {} == await c.addresses("judge")
