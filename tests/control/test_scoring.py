"""Tests that failed scores are tried again after pauses, and that wrong scorers end the run early."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest

from omni_async.control.events import EventLog
from omni_async.types import Activity, ScoreJob, Span
from tests.control.control_world import Bench, Run, distinct, make_config, make_result, scores, trained_steps


def made(count: int = 100, **config: Any) -> Bench:
    """Begins a run that has made as many samples as are admitted, `count` at most."""
    bench = Bench(**config)
    bench.make(bench.lease(count))
    return bench


def samples(jobs: list[ScoreJob]) -> list[str]:
    return [job.sample_id for job in jobs]


@pytest.mark.virtual_time
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_failed_score_is_tried_again_after_ever_longer_pauses_while_others_are_scored(at_once: bool) -> None:
    tries: dict[str, list[float]] = defaultdict(list)
    fails = {"g1.s0": 4, "g2.s1": 2, "g3.s1": 4}  # so often

    def reward(job: ScoreJob) -> float | str:
        times = tries[job.sample_id]
        times.append(asyncio.get_running_loop().time())
        return "HTTP 503" if len(times) <= fails.get(job.sample_id, 0) else distinct(job)

    config = make_config(S=1, score_retries=3, backoff_s=0.5, score_at_once=at_once, window=2, updates=4)
    played = await Run(config, reward=reward).play()
    assert played.outcome == ("done", None)
    ended = {entry.group: (entry.event, entry.reason, entry.reward) for entry in played.entries}
    for group in (1, 3):
        assert ended.pop(group)[:2] == ("rejected", "reward failed 4 times: HTTP 503")
    assert set(ended.values()) == {("trained", None, 0.5)}, "a failed score never becomes a number"
    for sample, times in tries.items():
        assert [time - times[0] for time in times] == [0.0, 0.5, 1.5, 3.5][: fails.get(sample, 0) + 1]
    assert tries["g2.s0"][0] < tries["g1.s0"][1]


@pytest.mark.virtual_time
async def test_a_run_ends_without_waiting_for_retries() -> None:
    bench = made(S=0, P=1, backoff_s=30.0)
    for job in bench.jobs():
        bench.fail(job)
    asking = asyncio.create_task(bench.c.next_to_score("reward-0", 2))
    closing = asyncio.create_task(bench.c.closing())
    await asyncio.sleep(1)
    assert not asking.done() and not closing.done()
    await bench.c.stop("enough")
    assert await asking == []
    await closing
    await bench.c.closing()
    assert [entry.event for entry in bench.entries] == ["dropped"]
    await asyncio.sleep(100)  # nothing comes back
    assert asyncio.get_running_loop().time() == 101


def test_a_postponed_score_costs_no_try() -> None:
    bench = made(S=0, P=1, score_retries=0)
    for number in range(6):
        (job,) = bench.jobs(1)
        assert job.sample_id == f"g0.s{number % 2}", "the others are tried first"
        bench.fail(job, fault="outage")
    assert bench.entries == []
    bench.fail(bench.jobs(1)[0], "unreadable")
    assert [entry.reason for entry in bench.entries] == ["reward failed 1 times: unreadable"]


def closing(bench: Bench) -> list[tuple[str, str]]:
    """Returns how the run ended, if it did."""
    return [(end["status"], end["reason"]) for end in bench.data("closing")]


@pytest.mark.parametrize("scored", [False, True])
async def test_a_scorer_that_fails_its_trial_ends_the_run(scored: bool) -> None:
    bench = made(1)
    if scored:
        bench.score()
    assert await bench.c.scorer_wrong("scorer 'x': AttributeError: y") != scored
    assert closing(bench) == ([] if scored else [("failed", "scorer 'x': AttributeError: y")])


@pytest.mark.parametrize(
    ("how", "scored", "ends"),
    [
        ({"wrong": True}, False, True),
        ({"wrong": True, "fault": "outage"}, False, True),
        ({"fault": "reject"}, False, True),
        pytest.param({}, False, False, id="that may not repeat"),
        pytest.param({"wrong": True}, True, False, id="one score is enough to blame the samples"),
    ],
)
async def test_samples_of_four_groups_that_all_fail_end_the_run(how: dict[str, Any], scored: bool, ends: bool) -> None:
    bench = made(S=1, P=2, score_retries=0)
    jobs = bench.jobs(8)
    if scored:
        bench.score(jobs[1:2])
    for job in jobs[:6:2]:
        bench.fail(job, "misspelt", **how)
        assert closing(bench) == []
    bench.fail(jobs[6], "misspelt", **how)
    reason = "nothing could be scored so far, and the error stays the same: misspelt"
    assert closing(bench) == ([("failed", reason)] if ends else [])
    assert ends or [entry.event for entry in bench.entries] == ["rejected"] * 4


async def test_a_final_failure_is_not_tried_again_and_ends_its_group_but_not_its_validation_round() -> None:
    bench = made(P=1, S=0, score_retries=5, validation={"every": 1})
    bad, good, train, _ = bench.jobs()
    bench.score([good], lambda job: 2.0)
    for job in (bad, train):
        bench.fail(job, "misspelt", fault="reject")
    assert bench.lines() == [(0, "rejected", "misspelt")], "the bare reason"
    assert [(round_["round"]["reward"], round_["round"]["reasons"]) for round_ in bench.data("validation")] == [
        (2.0, {"misspelt": 1})
    ]


@pytest.mark.virtual_time
@pytest.mark.parametrize("at_once", [True, False])
async def test_without_scorers_groups_are_ready_when_they_are_generated(at_once: bool) -> None:
    bench = Bench(S=0, P=2, unscored=True, drop_zero_variance=False, score_at_once=at_once)
    first, *rest = bench.lease(4)
    bench.make([first])
    asking = asyncio.create_task(bench.c.next_groups(0, 2))
    await asyncio.sleep(1)
    assert not asking.done()
    bench.make(rest)
    assert [group.rewards for group in await asking] == [[0.0, 0.0], [0.0, 0.0]]
    assert bench.entries == []


async def test_a_call_that_waits_for_work_hands_in_its_results_at_once_and_only_once() -> None:
    bench = Bench(S=0, P=1, group_size=2)
    first, second = bench.lease()
    results = [make_result(first, "rollout-0", (0,) * len(trained_steps(first)))]
    spans = Activity([Span("rollout-0", "generate", 0.0, 1.0)])
    leasing = asyncio.create_task(bench.c.next_samples("rollout-0", 1, 2, results, spans))
    await asyncio.sleep(0)
    (job,) = bench.jobs()
    await bench.c.samples_done("rollout-0", results)
    assert (job.sample_id, bench.jobs(), leasing.done()) == (first.sample_id, [], False)
    asking = asyncio.create_task(bench.c.next_to_score("reward-0", 1, scores([job], distinct)))
    await asyncio.sleep(0)
    bench.make([second])
    assert [one.sample_id for one in await asking] == [second.sample_id]
    bench.score([job])
    assert not bench.take()
    bench.score([ScoreJob(second.sample_id, "train", second.prompt, None)])
    assert len(bench.take()) == 1 and not leasing.done()
    leasing.cancel()


@pytest.mark.virtual_time
async def test_spans_reach_the_driver_with_other_events_or_after_a_second() -> None:
    log, loop = EventLog(), asyncio.get_running_loop()
    for kind, seconds in (("spans", 1.0), ("phase", 0.0)):
        began, taking = loop.time(), asyncio.create_task(log.take())
        await asyncio.sleep(0)
        log.add("spans", {})
        await asyncio.sleep(0)
        log.add(kind, {})
        assert [event.kind for event in await taking] == ["spans", kind]
        assert loop.time() - began == seconds
