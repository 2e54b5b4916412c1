"""Tests the bound on bytes: reserved before work begins, and never in the way of an update."""

from __future__ import annotations

import random
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from omni_async.config.held import is_shown, shown_of_group
from omni_async.config.schema import Emulation
from omni_async.control.held_bytes import Change, HeldBytes
from omni_async.types import SampleResult, VersionSpans
from tests.control.control_world import MEDIA_BYTES, SAMPLE_BYTES, Bench, make_config, make_result, now

CONFIG = make_config()
BOTH = SAMPLE_BYTES + MEDIA_BYTES


def bytes_now(bench: Bench) -> tuple[int, int, int]:
    """Returns the held and the reserved bytes, and the number of live groups."""
    buffers = bench.buffers()
    return buffers["bytes"]["ready"], buffers["bytes"]["reserved"], buffers["slots"]["live"]


def test_a_group_is_counted_from_its_admission_to_its_end() -> None:
    """Two samples a group, one group an update, and room for three groups; the first update shows one sample."""
    bench = Bench(S=3, P=1, updates=6, images=1, trajectories=2, max_bytes=6 * SAMPLE_BYTES + 5 * MEDIA_BYTES)
    bound = 6 * SAMPLE_BYTES + 5 * MEDIA_BYTES
    assert bytes_now(bench) == (0, bound, 1), "nothing is known, so one update has all the room"
    bench.lease()
    bench.make(bench.leased[0])
    assert bytes_now(bench) == (2 * BOTH, bound, 3), "what is known admits as many as fit, at once"
    bench.score()
    assert bytes_now(bench)[0] == 2 * SAMPLE_BYTES + MEDIA_BYTES, "the sample that may be shown keeps its media"
    taken = bench.take()
    assert bytes_now(bench)[0] == 2 * SAMPLE_BYTES + MEDIA_BYTES, "the trainer has it, and holds it"
    bench.train(taken)
    assert bytes_now(bench) == (0, bound, 3), "the next one was admitted in its place"
    (event,) = [event for event in bench.events() if event.kind == "update"]
    assert [one.media for one in event.shown] == ["media g0.s0"]


def test_only_samples_that_may_be_shown_keep_their_media() -> None:
    """Updates 1, 4 and 8 show samples; the group admitted at version 1 is trained by update 2 or 3."""
    bench = Bench(S=1, P=1, updates=9, images=1, images_every=4)
    for version in range(4):
        bench.generate(version)
        samples = list(bench.c._groups.groups[version].samples)
        kept = [sample.request.sample for sample in samples if sample.result and sample.result.media is not None]
        assert kept == ([0] if version != 2 else []), version
        bench.train(bench.take())
        bench.hold(bench.version)


def test_emulated_media_are_not_shown() -> None:
    assert len(shown_of_group(CONFIG, 0, 0)) == CONFIG.rollout.group_size
    emulated = replace(CONFIG, emulation=Emulation(profile="p.json"))
    assert not shown_of_group(emulated, 0, 0) and not is_shown(emulated, 1)


def test_a_round_keeps_media_of_the_samples_that_it_shows() -> None:
    rounds = {"every": 9, "samples_per_prompt": 2}
    bench = Bench(S=0, P=1, validation=rounds, images=2)
    requests = [request for request in bench.lease() if request.kind == "validation"]
    bench.make(requests)
    jobs = bench.jobs()
    bench.score(jobs[:3])
    (round_,) = bench.c._plane.validation.rounds.values()
    kept = [sample.result is not None and sample.result.media is not None for sample in round_.samples]
    assert kept == [True, False, True, True], "the last one has no score yet"
    bench.score(jobs[3:])
    (event,) = [event for event in bench.events() if event.kind == "validation"]
    assert [one.media for one in event.shown] == ["media v0.p0.s0", "media v0.p1.s0"]


def test_what_samples_of_a_group_share_is_counted_once_until_the_last_of_them_ends() -> None:
    bench = Bench(P=2, engines=2, retries=3)
    first, second, *_ = bench.lease()
    results = [replace(make_result(one, "rollout-0", (0, 0)), shared=(("text", 1000),)) for one in (first, second)]
    for result in results:
        now(bench.c.samples_done("rollout-0", [result]))
        assert bytes_now(bench)[0] in (BOTH + 1000, 2 * BOTH + 1000)
    assert bytes_now(bench)[1] == 2 * BOTH + 1000 + 6 * (BOTH + 1000), "each engine may store it for another group"
    jobs = bench.jobs()
    bench.fail(jobs[0], fault="replace")
    assert bytes_now(bench)[0] == BOTH + 1000
    bench.fail(jobs[1], fault="replace")
    assert bytes_now(bench)[0] == 0


def test_a_sample_beyond_its_share_ends_the_run_and_names_the_least_bound() -> None:
    bench = Bench(P=2, trajectories=2, images=1, max_bytes=4 * SAMPLE_BYTES + 3 * MEDIA_BYTES - 1)
    bench.make(bench.lease(1))
    (ended,) = bench.data("ended")
    assert ended["status"] == "failed"
    assert ended["reason"] == (
        "buffer.max_bytes: with sample g0.s0 a trajectory has up to 100 bytes, and the 4 samples of an update are held"
        " together, 3 of them with 40 bytes of media: expected at least 520, got 519"
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
    st.integers(0, 50),
    st.integers(1, 9),
    st.randoms(use_true_random=False),
)
@settings(max_examples=30, deadline=None)
def test_an_update_always_has_room(
    groups: int, size: int, more: int, largest: list[int], media: int, places: int, dice: random.Random
) -> None:
    """Makes, scores, loses and remakes samples of many sizes: the next group fits, and only growth exceeds the bound.

    The first sample of a group is shown, and at most `places` samples are unscored at once."""
    size += 1
    with_media = min(groups * size, places + groups)
    bound = 100 * groups * size + with_media * media + more
    held = HeldBytes(
        replace(
            CONFIG,
            rollout=replace(CONFIG.rollout, group_size=size),
            trainer=replace(CONFIG.trainer, groups_per_update=groups),
            buffer=replace(CONFIG.buffer, trajectories=places, max_bytes=bound),
            tracking=replace(CONFIG.tracking, images=groups),
        )
    )
    live: list[tuple[int, list[Made | None]]] = []  # the bucket of a group, and its samples that are made
    growth = 0

    def change(bucket: int, sample: int, how: Change, its: Made) -> int:
        before = held.reserved
        held.change(bucket, sample == 0, how, its.result, 0)
        return max(0, held.reserved - before)

    for _ in range(40):
        bucket = dice.randrange(len(largest))
        before = held.reserved
        if held.has_room(bucket, size, 1):
            held.reserve(bucket, size, 1)
            live.append((bucket, [None] * size))
            assert held.reserved <= max(bound, before)
        else:
            assert len(live) >= groups
        for its, samples in live:
            for i, made in enumerate(samples):
                unscored = sum(one is not None and not one.scored for _, group in live for one in group)
                if made is None and dice.random() < 0.5 and unscored < places:
                    samples[i] = new = Made(dice.randint(1, largest[its]), dice.randint(0, media))
                    growth += change(its, i, Change(-1, 1, 1), new)
                    assert held.problem("a") is None
                elif made is not None and not made.scored and dice.random() < 0.5:
                    change(its, i, Change(0, 0, -1), made)
                    samples[i] = Made(made.trajectory, made.media if i == 0 else 0, scored=True)
                elif made is not None and dice.random() < 0.1:
                    growth += change(its, i, Change(1, -1, -(not made.scored)), made)
                    samples[i] = None
        while live and (len(live) >= 2 * groups or dice.random() < 0.3):
            end(held, *live.pop(0))
        statistics = held.statistics()
        made_bytes = sum(made.trajectory + made.media for _, samples in live for made in samples if made)
        assert statistics["ready"] == made_bytes <= held.reserved <= bound + growth
    for ended in live:
        end(held, *ended)
    assert held.reserved == 0


class Made(NamedTuple):
    trajectory: int
    media: int
    scored: bool = False

    @property
    def result(self) -> SampleResult:
        """Returns the result of such a sample."""
        return SampleResult("a", "", None, None, 0, VersionSpans(), 0, 0, self.trajectory, media_bytes=self.media)


def end(held: HeldBytes, bucket: int, samples: list[Made | None]) -> None:
    for i, made in enumerate(samples):
        how = Change(-1, 0, 0) if made is None else Change(0, -1, -(not made.scored))
        held.change(bucket, i == 0, how, made and made.result, 0)
