"""Tests the bound on bytes: reserved before work begins, and never in the way of an update."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from omni_async.control.held_bytes import HeldBytes
from tests.control.control_world import SAMPLE_BYTES, Bench, now


def test_a_group_is_counted_from_its_admission_to_its_end() -> None:
    """Two samples a group, two groups an update, and room for three groups."""
    bench = Bench(S=3, P=1, updates=6, max_bytes=6 * SAMPLE_BYTES)

    def statistics() -> tuple[int, int, int]:
        buffers = bench.buffers()
        return buffers["bytes"]["ready"], buffers["bytes"]["reserved"], buffers["slots"]["live"]

    assert statistics() == (0, 6 * SAMPLE_BYTES, 1), "nothing is known, so one update has all the room"
    bench.lease()
    bench.make(bench.leased[0])
    assert statistics() == (2 * SAMPLE_BYTES, 6 * SAMPLE_BYTES, 3), "what is known admits as many as fit, at once"
    bench.score()
    taken = bench.take()
    assert statistics()[0] == 2 * SAMPLE_BYTES, "the trainer has it, and holds it"
    bench.train(taken)
    assert statistics() == (0, 6 * SAMPLE_BYTES, 3), "the next one was admitted in its place"


def test_a_sample_beyond_its_share_ends_the_run_and_names_the_least_bound() -> None:
    bench = Bench(P=2, max_bytes=4 * SAMPLE_BYTES - 1)
    bench.make(bench.lease(1))
    (ended,) = bench.data("ended")
    assert ended["status"] == "failed"
    assert ended["reason"] == (
        "buffer.max_bytes: sample g0.s0 has 100 bytes, and the 4 samples of an update are held together: expected"
        " at least 400, got 399"
    )
    assert bench.lease() == []


def test_a_bound_that_is_too_small_for_a_resumed_run_costs_it_no_group_that_was_ready() -> None:
    before = Bench(S=3, P=1, updates=6)
    before.generate(0, 1, 2)
    kept = now(before.c.continuation())
    assert [ready.group for ready in kept.ready] == [0, 1, 2]
    after = Bench(S=3, P=1, updates=6, max_bytes=2 * SAMPLE_BYTES - 1, start=kept)
    (ended,) = after.data("ended")
    assert ended["status"] == "failed" and "expected at least 200, got 199" in ended["reason"]
    still = now(after.c.continuation())
    assert sorted(still.ready, key=lambda ready: ready.group) == sorted(kept.ready, key=lambda ready: ready.group)


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 400),
    st.lists(st.integers(1, 100), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_an_update_always_has_room(groups: int, size: int, more: int, largest: list[int], dice: random.Random) -> None:
    """Makes, loses and remakes samples of many sizes: the next group fits, and only growth exceeds the bound."""
    bound = 100 * groups * size + more
    held = HeldBytes(bound, groups * size)
    live: list[tuple[int, list[int | None]]] = []  # the bucket of a group, and the sizes of its samples that are made
    growth = 0
    for _ in range(40):
        bucket = dice.randrange(len(largest))
        before = held.reserved
        if held.has_room(bucket, size):
            held.reserve(bucket, size)
            live.append((bucket, [None] * size))
            assert held.reserved <= max(bound, before)
        else:
            assert len(live) >= groups
        for its, sizes in live:
            for i, made in enumerate(sizes):
                before = held.reserved
                if made is None and dice.random() < 0.5:
                    sizes[i] = new = dice.randint(1, largest[its])
                    held.change(its, -1, 1, new)
                    assert held.problem("a", new) is None
                    growth += max(0, held.reserved - before)
                elif made is not None and dice.random() < 0.1:
                    held.change(its, 1, -1, made)
                    growth += held.reserved - before
                    sizes[i] = None
        while live and (len(live) >= 2 * groups or dice.random() < 0.3):
            end(held, *live.pop(0))
        statistics = held.statistics()
        made_bytes = sum(made or 0 for _, sizes in live for made in sizes)
        assert statistics["ready"] == made_bytes <= held.reserved <= bound + growth
    for ended in live:
        end(held, *ended)
    assert held.reserved == 0


def end(held: HeldBytes, bucket: int, sizes: list[int | None]) -> None:
    for made in sizes:
        held.change(bucket, -(made is None), -(made is not None), made or 0)
