"""Tests engines and reward workers that come and go while a run goes on."""

from __future__ import annotations

import asyncio

from control_world import digest_of, distinct, finish, hold, make_config, make_coordinator, now, report, score

from omni_async.types import ScoreResult, WeightReport


async def test_the_samples_of_a_lost_engine_are_made_again_from_the_same_seeds() -> None:
    c, _ = make_coordinator(make_config(engines=2, S=1, P=2))
    await hold(c, 0, "rollout-0", "rollout-1")
    lost = await c.next_samples("rollout-0", 4, 4)
    await c.engine_lost("rollout-0", "killed")
    again = await c.next_samples("rollout-1", 8, 8)
    seeds = {request.sample_id: request.seed for request in again}
    assert {request.sample_id: request.seed for request in lost}.items() <= seeds.items()
    assert {request.attempt for request in again if request.sample_id in {one.sample_id for one in lost}} == {2}
    await finish(c, "rollout-0", lost, 0)  # still on their way when it died
    assert await c.continuation() and not c._samples.statistics()["ready"], "its late answers count for nothing"


async def test_a_lost_engine_that_had_asked_gets_nothing() -> None:
    c, _ = make_coordinator(make_config(engines=2, S=0, P=1))
    await hold(c, 0, "rollout-0", "rollout-1")
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


async def test_the_slowest_engine_is_lost_and_its_slots_are_free() -> None:
    c, _ = make_coordinator(make_config(engines=2, S=0, P=1, updates=3))
    await hold(c, 0, "rollout-0", "rollout-1")
    requests = await c.next_samples("rollout-0", 8, 8) + await c.next_samples("rollout-1", 8, 8)
    for request in requests:
        await finish(c, c._samples.samples[request.sample_id].engine, [request], 0)
    await score(c, await c.next_to_score("reward-0", 8), distinct)
    groups = await c.next_groups(0, 1)
    await c.update_done(report(1, groups))
    await c.announce(1, digest_of(1))
    await c.engine_holds(WeightReport("rollout-0", 1, digest_of(1)))
    assert c.versions.held == 0 and (await c.continuation()).next_group == 1
    await c.engine_lost("rollout-1", "killed")
    assert c.versions.held == 1 and (await c.continuation()).next_group == 2


async def test_one_that_joins_with_weights_all_others_have_left_behind_gets_no_work() -> None:
    """Checks that it gets no samples: they could reach the trainer beyond the budget."""

    c, _ = make_coordinator(make_config(engines=1, updates=5))
    await hold(c, 0)
    c.versions.trained = 1
    await c.engine_joins("rollout-9")
    await hold(c, 1)
    await c.engine_holds(WeightReport("rollout-9", 0, digest_of(0)))
    assert c.versions.held == 1 and c.versions.of("rollout-9") == -1
    await c.engine_holds(WeightReport("rollout-9", 1, digest_of(1)))
    assert c.versions.of("rollout-9") == 1


async def test_what_a_lost_reward_worker_had_is_scored_by_others_first_and_one_by_one() -> None:
    c, _ = make_coordinator(make_config(S=1, P=2))
    await hold(c, 0)
    await finish(c, "rollout-0", await c.next_samples("rollout-0", 8, 8), 0)
    lost = await c.next_to_score("reward-0", 3)
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
    await c.scored(
        "reward-1",
        [ScoreResult(job.sample_id, job.attempt, error="x") for job in again],
    )


async def test_weights_that_a_lost_engine_reports_are_no_news() -> None:
    """Gives an engine up after it swapped, before its report arrives: no engine has wrong weights."""

    c, _ = make_coordinator(make_config(engines=2))
    await hold(c, 0, "rollout-0", "rollout-1")
    await c.engine_lost("rollout-1", "killed")
    await c.engine_holds(WeightReport("rollout-1", 0, digest_of(0)))
    assert c.versions.engines == {"rollout-0": 0} and not c._closed


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

    c, _ = make_coordinator(make_config(S=0, P=1, engines=2))
    await hold(c, 0, "rollout-0", "rollout-1")
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
