"""Tests a control plane that goes on from the state that a checkpoint kept."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from omni_async.control.control_state import ControlState, LedgerState, Unfinished
from omni_async.types import Prompt, VersionSpans
from tests.control.control_world import Bench, now


def kept_of(bench: Bench) -> ControlState:
    kept: ControlState = now(bench.c.continuation())
    return kept


def test_groups_in_every_state_go_on() -> None:
    """Keeps one trained group, one ready, two unfinished, the rest not begun."""
    before = Bench(S=3, P=1, updates=6)
    before.generate(0, 1)
    before.train(before.take())
    kept = kept_of(before)
    assert (kept.version, kept.next_group, kept.ledger.lines, kept.ledger.admitted) == (1, 4, 1, 1)
    assert [group.group for group in kept.ready] == [1] and [one.group for one in kept.unfinished] == [2, 3]

    after = Bench(S=3, P=1, updates=6, start=kept)
    groups = after.take()
    assert [(g.group, g.oldest_version) for g in groups] == [(1, 0)], "ready as it was, as old as it was"
    assert groups[0].rewards == kept.ready[0].rewards
    after.train(groups)
    after.lease()
    assert [after.leased[group] for group in (2, 3)] == [before.leased[group] for group in (2, 3)]
    assert after.lines() == [(1, "trained", None)]
    assert after.c.ledger.counters() == {"admitted": 5, "trained": 2, "rejected": 0, "dropped": 0, "live": 3}


async def test_an_interrupted_run_keeps_what_it_drops() -> None:
    """Checks that dropped groups are admitted again by the next attempt, and their lines are void."""
    bench = Bench(S=1, P=2, updates=3)
    bench.generate(0)
    assert bench.take()
    await bench.c.stop("ctrl-c")
    assert bench.take() == [] and {entry.event for entry in bench.entries} == {"dropped"}
    kept = kept_of(bench)
    assert kept.ledger == LedgerState(0, {"trained": 0, "rejected": 0, "dropped": 0})
    assert [g.group for g in kept.ready] == [0] and [one.group for one in kept.unfinished] == [1, 2, 3]
    assert kept.next_group == 4


def test_a_smaller_staleness_budget_makes_old_groups_again() -> None:
    before = Bench(S=3, P=1, updates=6)
    before.generate(0, 1, 2)
    for _ in range(2):
        before.train(before.take())
    kept = kept_of(before)
    assert [(g.group, g.oldest_version) for g in kept.ready] == [(2, 0)] and kept.version == 2
    after = Bench(S=1, P=1, updates=6, start=kept)
    after.lease()
    assert 2 in after.leased


@pytest.mark.parametrize("change", ["fewer samples", "more samples", "another prompt", "more steps"])
async def test_a_ready_group_that_would_be_another_now_is_made_again(change: str) -> None:
    before = Bench(S=1, P=1)
    before.generate(0)
    kept = kept_of(before)
    (ready,) = kept.ready
    endless = tuple(replace(sample, step_versions=VersionSpans.same(0, 10**12)) for sample in ready.samples)
    other = {"another prompt": {"prompt": Prompt(9, "of another file")}, "more steps": {"samples": endless}}
    kept = replace(kept, ready=(replace(ready, **other.get(change, {})),))
    size = {"fewer samples": 1, "more samples": 3}.get(change, 2)
    after = Bench(S=1, P=1, group_size=size, start=kept)
    after.lease()
    requests = after.leased[0]
    assert len(requests) == size
    after.complete(requests)
    groups = [(group.group, len(group.samples), group.prompt.text) for group in after.take()]
    assert groups == ([(0, size, requests[0].prompt.text)] if size > 1 else []), "one sample has no signal"


def test_attempts_are_remembered() -> None:
    kept = ControlState(version=1, next_group=3, unfinished=(Unfinished(2, attempts=3),))
    bench = Bench(S=0, P=1, updates=2, start=kept)
    bench.generate(2)
    bench.train(bench.take())
    assert [(entry.group, entry.attempts) for entry in bench.entries] == [(2, 3)]
