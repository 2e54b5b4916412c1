"""Tests a control plane that goes on from the state that a checkpoint kept."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from control_world import Bench, Run, distinct, finish, hold, make_config, make_coordinator, now, report, score

from omni_async.control.control_state import ControlState, LedgerState, Unfinished
from omni_async.types import Prompt
from omni_async.version_spans import VersionSpans


async def test_groups_in_every_state_go_on() -> None:
    """Keeps one trained group, one ready, two unfinished, the rest not begun."""
    before = Bench(S=3, P=1, updates=6)
    config = make_config(S=3, P=1, updates=6)
    for group in (0, 1):
        await before.generate(group, 0)
    taken = before.take()
    assert taken is not None
    await before.train(taken)
    kept = await before.c.continuation()
    assert (kept.version, kept.next_group, kept.ledger.lines, kept.ledger.admitted) == (1, 4, 1, 1)
    assert [group.group for group in kept.ready] == [1] and [one.group for one in kept.unfinished] == [2, 3]

    after, entries = make_coordinator(config, start=kept)
    await hold(after, 1)
    groups = await after.next_groups(1, 1)
    assert [(g.group, g.oldest_version) for g in groups] == [(1, 0)], "ready as it was, as old as it was"
    assert groups[0].rewards == kept.ready[0].rewards
    await after.update_done(report(2, groups))
    requests = now(after.next_samples("rollout-0", 8, 8))
    former = {r.sample_id: r for group in (2, 3) for r in before.waiting[group]}
    for request in requests:
        if request.group in (2, 3):
            assert msgspec.structs.replace(request, fields=()) == msgspec.structs.replace(
                former[request.sample_id], fields=()
            )
    assert {request.group for request in requests} >= {2, 3}
    assert [(e.group, e.event) for e in entries] == [(1, "trained")]
    assert after.ledger.counters() == {"admitted": 5, "trained": 2, "rejected": 0, "dropped": 0, "live": 3}


@pytest.mark.parametrize("S", [0, 1, 3])
@pytest.mark.parametrize("stop_at", [0, 1, 2, 5])
def test_a_run_that_was_cut_anywhere_trains_every_group_once(S: int, stop_at: int) -> None:
    config = make_config(S=S, P=2, updates=6, window=2, groups=16)

    class Cut(Run):
        kept: ControlState | None = None

        async def turns(self, kind: str) -> None:
            await super().turns(kind)
            if (
                self.kept is None
                and kind == "publish"
                and self.coordinator.versions.trained >= stop_at
                and not self.coordinator._groups.in_training
            ):
                self.kept = await self.coordinator.continuation()
                self.lines = len(self.entries)

    first = asyncio.run(Cut(config, seed=S).play())
    assert first.kept is not None and first.kept.ledger.lines == first.lines
    valid = first.entries[: first.lines]  # type: ignore[attr-defined]
    second = asyncio.run(Run(config, seed=S + 1, start_version=first.kept.version, start=first.kept).play())
    assert second.outcome == ("done", None)
    events = [(e.group, e.event) for e in [*valid, *second.entries]]
    assert len({group for group, _ in events}) == len(events)
    assert [event for _, event in events].count("trained") == 12
    assert max(second.staleness, default=0) <= S


async def test_an_interrupted_run_keeps_what_it_drops() -> None:
    """Checks that groups in this attempt's ledger as dropped are admitted again by the next one, and those lines are
    void."""
    bench = Bench(S=1, P=2, updates=3)
    await bench.generate(0, 0)
    assert bench.take() is not None
    await bench.c.stop("ctrl-c")
    assert await bench.c.next_groups(0, 1) == []
    assert {e.event for e in bench.entries} == {"dropped"}
    kept = await bench.c.continuation()
    assert kept.ledger == LedgerState(0, {"trained": 0, "rejected": 0, "dropped": 0})
    assert [g.group for g in kept.ready] == [0] and [one.group for one in kept.unfinished] == [1, 2, 3]
    assert kept.next_group == 4


async def test_a_smaller_staleness_budget_makes_old_groups_again() -> None:
    before = Bench(S=3, P=1, updates=6)
    for group in (0, 1, 2):
        await before.generate(group, 0)
    for _ in range(2):
        taken = before.take()
        assert taken is not None
        await before.train(taken)
    kept = await before.c.continuation()
    assert [(g.group, g.oldest_version) for g in kept.ready] == [(2, 0)] and kept.version == 2
    after, _ = make_coordinator(make_config(S=1, P=1, updates=6), start=kept)
    await hold(after, 2)
    assert 2 in {r.group for r in now(after.next_samples("rollout-0", 8, 8))}


@pytest.mark.parametrize("change", ["fewer samples", "more samples", "another prompt", "more steps"])
async def test_a_ready_group_that_would_be_another_now_is_made_again(change: str) -> None:
    before = Bench(S=1, P=1, updates=4)
    await before.generate(0, 0)
    kept = await before.c.continuation()
    (ready,) = kept.ready
    if change == "another prompt":
        kept = msgspec.structs.replace(
            kept, ready=(msgspec.structs.replace(ready, prompt=Prompt(9, "of another file")),)
        )
    if change == "more steps":
        endless = VersionSpans.same(0, 10**12)
        samples = tuple(msgspec.structs.replace(sample, step_versions=endless) for sample in ready.samples)
        kept = msgspec.structs.replace(kept, ready=(msgspec.structs.replace(ready, samples=samples),))
    size = {"fewer samples": 1, "more samples": 3}.get(change, len(ready.samples))
    after, _ = make_coordinator(make_config(S=1, P=1, updates=4, group_size=size), start=kept)
    await hold(after, 0)
    requests = [request for request in now(after.next_samples("rollout-0", 16, 16)) if request.group == 0]
    assert len(requests) == size
    await finish(after, "rollout-0", requests, 0)
    await score(after, now(after.next_to_score("reward-0", size)), distinct)
    if size > 1:
        (group,) = await after.next_groups(0, 1)
        assert (group.group, len(group.samples), group.prompt.text) == (0, size, requests[0].prompt.text)


async def test_attempts_are_remembered() -> None:
    kept = ControlState(version=1, next_group=3, unfinished=(Unfinished(2, attempts=3),))
    c, entries = make_coordinator(make_config(S=0, P=1, updates=2), start=kept)
    await hold(c, 1)
    await finish(c, "rollout-0", now(c.next_samples("rollout-0", 8, 8)), 1)
    await score(c, now(c.next_to_score("reward-0", 8)), distinct)
    await c.update_done(report(2, await c.next_groups(1, 1)))
    assert [(e.group, e.attempts) for e in entries] == [(2, 3)]
