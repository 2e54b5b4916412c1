"""Tests directed cases: whole runs of well-behaved roles at the edges of the configuration, and exact scenarios driven
call by call."""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from omni_async.aio.clock import ManualClock
from omni_async.config.schema import Role
from omni_async.control.control_state import ControlState
from omni_async.control.coordinator import Coordinator
from omni_async.control.requests import RequestFactory
from omni_async.control.versions import WeightMismatch
from omni_async.types import LedgerEntry, SampleRequest, Score, ScoreJob, ScoreResult, WeightReport
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
from tests.support.patience import PATIENCE

CONTINUED = {"start": ControlState(version=3, next_group=11)}


# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "how"),
    [
        *(({"S": S, "P": P, "updates": n}, {}) for S, P, n in ((0, 1, 1), (0, 3, 5), (1, 1, 5), (4, 3, 1), (4, 3, 5))),
        *(({"S": S, "updates": 7, "publish_every": S + 1}, {}) for S in range(4)),
        *(({"S": S, "updates": 6, "engines": 2, "steps": 3}, {}) for S in (0, 2)),
        ({"drop_zero_variance": False}, {"reward": lambda job: 0.25}),
        ({"validation": {"every": 1}}, {"validation_prompts": 0}),
        ({"updates": 5}, CONTINUED),
        ({"updates": 3}, CONTINUED),
    ],
    ids=lambda given: str(given) if given and "updates" in given else " ".join(given) or "",
)
def test_a_run_trains_exactly_what_was_asked(config: dict[str, Any], how: dict[str, Any]) -> None:
    run = play(made := make_config(**config), seed=3, **how)
    first, last = run.start_version, made.trainer.updates
    assert run.outcome == ("done", None)
    assert Counter(entry.event for entry in run.entries)["trained"] == (last - first) * made.trainer.groups_per_update
    assert max(run.staleness, default=0) <= made.staleness.max_updates
    assert [entry.staleness for entry in run.entries] == run.staleness
    assert [event["version"] for event in run.of_kind("update")] == list(range(first + 1, last + 1))
    if how == CONTINUED:
        assert [entry.group for entry in run.entries] == list(range(11, 11 + 2 * (last - first)))
    if made.weights.publish_every > 1:
        assert max(run.staleness) == made.staleness.max_updates, "the worst is reached, and not passed"
    assert run.coordinator.versions.held == last, "the last version is published although it is not due"


@pytest.mark.parametrize("rejects", [False, True])
@pytest.mark.parametrize(("S", "P", "window"), [(0, 2, 1), (1, 1, 4), (3, 2, 1), (3, 1, 4)])
def test_exact_staleness_is_the_budget_after_as_many_updates(S: int, P: int, window: int, rejects: bool) -> None:
    """Ages climb 0, 1, ..., S, because all that the first S + 1 updates train is admitted under version 0; the
    replacement of a group that is rejected is as old as that."""
    config = {"S": S, "P": P, "updates": S + 5, "engines": 2, "window": window}
    reward = lambda job: 0.5 if rejects and number_of(job.sample_id) % 3 == 1 else distinct(job)  # noqa: E731
    slow = {"generate": 9, "publish": 9}
    run = play(make_config(**config, exact=True), seed=4, pause=slow, reward=reward)
    assert run.outcome == ("done", None)
    assert any(entry.event == "rejected" for entry in run.entries) == rejects
    assert run.staleness == [min(version, S) for version in range(S + 5) for _ in range(P)]
    if S == 3:
        assert play(make_config(**config), pause=slow).staleness != run.staleness, "without it ages are mixed"
        again = play(make_config(**config | {"P": 1}, exact=True), start=ControlState(version=2, next_group=12))
        assert again.staleness == [0, 1, 2, 3, 3, 3], "a resumed run climbs again"


def test_all_groups_rejected_ends_the_run_and_says_why() -> None:
    run = play(make_config(S=2, P=3), reward=lambda job: 0.25)
    status, reason = run.outcome
    assert status == "failed" and "zero reward variance" in str(reason) and "in a row" in str(reason)
    assert {entry.event for entry in run.entries} <= {"rejected", "dropped"}
    assert run.of_kind("ended")[0]["reasons"]["zero reward variance"] >= 4


def test_rejections_count_in_a_row_only_while_no_group_turns_out_well() -> None:
    """Rejects 57 groups in all, 19 between each two good ones; 32 in a row would end the run."""
    run = play(
        make_config(S=0, P=2, updates=2),
        reward=lambda job: distinct(job) if number_of(job.sample_id) % 20 == 0 else 0.0,
    )
    assert run.outcome == ("done", None)
    assert [entry.group for entry in run.entries if entry.event == "trained"] == [0, 20, 40, 60]


@pytest.mark.parametrize(("aggregate", "event"), [("rewards", "rejected"), ("advantages", None), ("gdpo", None)])
def test_scorers_that_cancel_out_are_signal_where_each_has_advantages_of_its_own(
    aggregate: str, event: str | None
) -> None:
    bench = Bench(S=0, P=1, aggregate=aggregate)
    bench.make(bench.lease())
    values = zip(bench.jobs(), ((1.0, 0.0), (0.0, 1.0)), strict=True)
    results = [ScoreResult(job.sample_id, 1, score=Score(1.0, values=value)) for job, value in values]
    now(bench.c.scored("reward-0", results))
    assert [entry.event for entry in bench.entries] == ([] if event is None else [event])


def test_a_failing_sample_is_made_again_from_the_same_seed_and_then_drops_its_group() -> None:
    def generate(engine: str, request: SampleRequest) -> str | None:
        hopeless = request.sample_id == "g1.s1"
        return "CUDA out of memory" if hopeless or (request.sample_id == "g2.s0" and request.attempt == 1) else None

    run = play(make_config(retries=2, engines=2), generate=generate)
    assert run.outcome == ("done", None)
    assert [(e.group, e.event, e.reason, e.attempts) for e in run.entries if e.event != "trained"] == [
        (1, "dropped", "generation failed 3 times: CUDA out of memory", 3)
    ]
    assert {e.group: e.attempts for e in run.entries if e.event == "trained"}[2] == 2
    for sample_id, count in (("g1.s1", 3), ("g2.s0", 2)):
        tries = [request for request in run.requests if request.sample_id == sample_id]
        assert [request.attempt for request in tries] == list(range(1, count + 1))
        assert len({(r.seed, r.initial_seed, r.window, r.prompt.index) for r in tries}) == 1


def test_what_is_generated_does_not_depend_on_engines_or_timing_nor_training_on_when_samples_are_scored() -> None:
    alone, *others = (play(make_config(S=2, engines=engines), seed=seed) for engines, seed in ((1, 0), (1, 1), (3, 2)))
    for run in others:
        assert {r.sample_id: r for r in run.requests} == {r.sample_id: r for r in alone.requests}
    at_once, in_step = (
        play(make_config(S=0, P=3, engines=2, score_at_once=how), seed=7).taken for how in (True, False)
    )
    assert at_once == in_step


# ---- validation ------------------------------------------------------------------------------------------------------


def test_validation_comes_first_at_every_multiple_and_last() -> None:
    run = play(make_config(S=1, P=1, updates=7, validation={"every": 3, "samples_per_prompt": 2}), validation_prompts=3)
    assert [event["version"] for event in run.of_kind("validation")] == [0, 3, 6, 7]
    assert all(event["round"]["reward"] == 0.5 and not event["round"]["reasons"] for event in run.of_kind("validation"))
    requests = [r for r in run.requests if r.kind == "validation"]
    assert len(requests) == 4 * 3 * 2
    assert all(r.noise_level == 0 and r.window is None and r.fields == () for r in requests)
    first, last = ({r.sample_id.split(".", 1)[1]: r.seed for r in requests if r.group == version} for version in (0, 7))
    assert first == last, "rounds differ by the policy alone"


@pytest.mark.parametrize(
    ("limit", "prompts"), [(1, [0]), (3, [0, 2, 4]), (5, [0, 1, 2, 4, 5]), (7, [*range(7)]), (9, [*range(7)])]
)
def test_a_limit_takes_prompts_from_the_whole_file_and_leaves_their_seeds(limit: int, prompts: list[int]) -> None:
    def seeds(**validation: Any) -> dict[int, int]:
        factory = RequestFactory(make_config(validation=validation))
        return {request.prompt.index: request.seed for request in factory.validation(3, tuple(make_prompts(7)))}

    limited, whole = seeds(limit=limit), seeds()
    assert list(limited) == prompts
    assert limited.items() <= whole.items()


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


def test_failed_validation_samples_are_counted_and_enter_no_mean() -> None:
    def reward(job: ScoreJob) -> float | str:
        return "HTTP 503" if job.kind == "validation" and job.sample_id.startswith("v0.p0") else distinct(job)

    def generate(engine: str, request: SampleRequest) -> str | None:
        return "CUDA out of memory" if request.sample_id == "v0.p1.s0" else None

    run = play(make_config(validation={"every": 100, "samples_per_prompt": 2}), reward=reward, generate=generate)
    assert run.outcome == ("done", None)
    first = run.of_kind("validation")[0]
    finished = first["round"]
    assert (finished["scored"], finished["asked"], finished["reward"]) == (1, 4, 1.0)
    assert finished["reasons"] == {"HTTP 503": 2, "generation failed: CUDA out of memory": 1}
    assert finished["scores"] == {"reward": (None, None, None, 1.0)}


def test_validation_says_which_versions_its_samples_started_with() -> None:
    bench = Bench(S=1, P=1, validation={"every": 100})
    requests = bench.lease(2, capacity=4)
    assert [r.kind for r in requests] == ["validation", "validation"]
    bench.c.versions.trained = 1
    for version, request in enumerate(requests):
        bench.make([request], version)
    bench.score()
    assert [(round_["version"], round_["versions"]) for round_ in bench.data("validation")] == [(0, [0, 1])]


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "digest", "reason"),
    [
        (0, "abc", "engine rollout-1 holds version 0 with digest abc, published was digest-0"),
        (5, digest_of(5), "engine rollout-1 holds version 5, which was never published (latest: 1)"),
        (0, digest_of(0), "went back from version 1 to 0"),
    ],
)
def test_an_engine_with_wrong_weights_is_given_up_and_its_samples_are_made_by_others(
    version: int, digest: str, reason: str
) -> None:
    bench = Bench(engines=2)
    taken = {request.sample_id for request in bench.lease(2, "rollout-1")}
    bench.c.versions.trained = 1
    bench.hold(1, "rollout-1" if "back" in reason else "rollout-0")
    now(bench.c.engine_holds(WeightReport("rollout-1", version, digest)))
    ((name, why),) = [(lost["name"], lost["reason"]) for lost in bench.data("lost")]
    assert name == "rollout-1" and reason in why and not bench.entries
    assert bench.lease(2, "rollout-1") == []
    assert taken <= {request.sample_id for request in bench.lease()}


def test_a_report_of_an_engine_that_is_none_of_the_runs_changes_nothing() -> None:
    bench = Bench(engines=2)
    now(bench.c.engine_holds(WeightReport("rollout-7", 0, digest_of(0))))
    assert not bench.entries and now(bench.c.statistics())["engines"] == {"rollout-0": 0, "rollout-1": 0}


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
def test_a_training_sample_has_the_versions_of_all_trained_steps_or_none_and_a_validation_sample_has_none(
    kind: str, steps: int | None, versions: tuple[int, ...], problem: str | None
) -> None:
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


@pytest.mark.parametrize("stored", [False, True])
def test_a_group_of_a_dataset_is_as_old_as_its_admission_and_has_no_age_if_it_is_not_trained(stored: bool) -> None:
    bench = Bench(S=2, P=1, updates=9, steps=3, stored=stored)
    for _ in range(5):
        bench.lease()
        bench.generate(*bench.leased)
        bench.train(bench.take())
        bench.hold(bench.version)
    ages = [(e.admitted_version, e.trained_version, e.staleness) for e in bench.entries]
    assert ages == [(0, 1, 0), (0, 2, 1), (0, 3, 2), (1, 4, 2), (2, 5, 2)]
    made_with = [None] * 5 if stored else [(version, version) for version, _, _ in ages]
    assert [e.step_versions for e in bench.entries] == made_with
    assert [update["staleness"] for update in bench.data("update")] == [[age] for _, _, age in ages]
    now(bench.c.stop("ctrl-c"))
    dropped = {(e.event, e.staleness, e.step_versions if stored else None) for e in bench.entries[5:]}
    assert dropped == {("dropped", None, None)}


async def test_a_group_beyond_the_budget_ends_the_run_instead_of_being_trained() -> None:
    """Imitates a bug, since it cannot happen, by a trainer that is ahead of what it reported."""
    bench = Bench(S=1, P=1)
    bench.generate(0, 1)
    bench.version = 2
    assert bench.take() == []
    assert "reached the trainer 2 updates old, the budget is 1" in bench.data("ended")[0]["reason"]
    assert {entry.event for entry in bench.entries} == {"dropped"}


# ---- order -----------------------------------------------------------------------------------------------------------


async def test_a_trainer_waiting_for_a_group_that_is_rejected_gets_the_next_one_at_once() -> None:
    bench = Bench(S=3, P=1, updates=10)
    bench.generate(1)
    trainer = asyncio.create_task(bench.c.next_groups(0, 1))
    await asyncio.sleep(0)
    assert not trainer.done()
    bench.generate(0, values=lambda job: 0.5)
    (group,) = await asyncio.wait_for(trainer, PATIENCE)
    assert group.group == 1


def test_engines_share_a_short_queue_evenly_and_one_that_has_its_share_gets_one_more_at_a_time() -> None:
    for group_size, engines, asking, leased in ((3, 4, (0, 1, 2, 3), [3, 3, 3, 3]), (2, 2, (0, 0, 0, 0), [4, 1, 1, 1])):
        bench = Bench(S=0, P=4, group_size=group_size, engines=engines)
        assert [len(bench.lease(16, f"rollout-{i}")) for i in asking] == leased


# ---- ends ------------------------------------------------------------------------------------------------------------

INTERRUPTED = ("dropped", "run interrupted: ctrl-c")


async def test_stopping_sends_every_waiter_home_at_once() -> None:
    c = Bench(holding=False).c
    waits = c.next_samples("rollout-0", 1, 1), c.next_to_score("reward-0", 1), c.next_groups(0, 1)
    waiters = [asyncio.create_task(wait) for wait in waits]
    await asyncio.sleep(0)
    assert not any(waiter.done() for waiter in waiters)
    await c.stop("ctrl-c")
    assert await asyncio.wait_for(asyncio.gather(*waiters), PATIENCE) == [[], [], []]


async def test_an_update_under_way_when_the_run_is_stopped_is_still_made() -> None:
    """Checks that its groups are not in the ledger as dropped: its optimizer steps are in the checkpoint that
    follows."""
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


async def test_nothing_is_said_after_the_end() -> None:
    bench = Bench(validation={"every": 1}, validation_prompts=1)
    bench.make([request for request in bench.lease() if request.kind == "validation"])
    jobs = bench.jobs()
    await bench.c.fail("engine rollout-0 crashed")
    bench.score(jobs)
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
    results = [ScoreResult(job.sample_id, 1, score=one) for job, one in zip(bench.jobs(), scores, strict=True)]
    now(bench.c.scored("reward-0", results))
    (group,) = groups = bench.take()
    assert group.rewards == [1.0, 3.0] and group.oldest_version == 0
    bench.train(groups)
    (event,) = bench.events()
    assert event.kind == "update"
    expected = {"version": 1, "reward": 2.0, "parts": {"ocr": 1.0}, "staleness": [0]}
    assert {key: event.data[key] for key in expected} == expected
    assert event.data["conservation"] == {"admitted": 2, "trained": 1, "rejected": 0, "dropped": 0, "live": 1}
    assert [image.media for image in event.shown] == ["media g0.s0", "media g0.s1"]
    assert event.shown[0].score.text == "HI" and event.shown[0].prompt.text.startswith("prompt ")
    (entry,) = bench.entries
    assert (entry.run, entry.group, entry.event) == ("run-1", 0, "trained")
    assert (entry.reward, entry.step_versions) == (2.0, (0, 0))
    assert (entry.admitted_version, entry.trained_version, entry.staleness, entry.attempts) == (0, 1, 0, 1)


def test_training_samples_carry_the_fields_the_objective_asked_for() -> None:
    bench = Bench(validation={"every": 1, "share": 0.5}, holding=False)
    now(bench.c.require_fields(("latents", "means")))
    bench.hold(0)
    assert {r.kind: r.fields for r in bench.lease()} == {"train": ("latents", "means"), "validation": ()}


async def test_a_ledger_that_cannot_be_written_ends_the_run_whoever_ended_the_group() -> None:
    """Rejects a group through a reward worker's message: the worker has done nothing wrong, and no group may stay
    behind for it."""

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
