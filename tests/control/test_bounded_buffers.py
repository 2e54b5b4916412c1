"""Tests that both buffers reserve room before work begins, so that nothing finished ever waits for a slot."""

from __future__ import annotations

import pytest
from control_world import make_prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_async.control.buffer import ReplayBuffer, TrajectoryBuffer
from omni_async.types import Prompt, ReadyGroup, ReadySample, SampleKind, Score, ScoreJob, SdeWindow
from omni_async.version_spans import VersionSpans

PROMPT: Prompt = make_prompts(1)[0]


def job(sample_id: str, kind: SampleKind = "train") -> ScoreJob:
    return ScoreJob(sample_id, kind, PROMPT, None)


def group(number: int, version: int = 0) -> ReadyGroup:
    sample = ReadySample(f"g{number}.s0", None, None, Score(1.0), VersionSpans.same(version, 2))
    return ReadyGroup(number, PROMPT, SdeWindow(0, 2), version, (sample,))


# ---- trajectories ----------------------------------------------------------------------------------------------------


def test_a_sample_keeps_its_place_until_it_is_scored() -> None:
    buffer = TrajectoryBuffer(1)
    buffer.reserve("a")
    with pytest.raises(ValueError, match="no room for sample b: all 1 buffer slots are reserved"):
        buffer.reserve("b")
    buffer.put(job("a"))
    assert [j.sample_id for j in buffer.take("reward-0", 5)] == ["a"]
    assert buffer.free == 0 and buffer.being_scored("reward-0", "a")
    buffer.release("a")
    assert buffer.free == 1 and not buffer.being_scored("reward-0", "a")


def test_a_sample_without_a_place_is_refused() -> None:
    with pytest.raises(ValueError, match="sample a has no buffer slot reserved"):
        TrajectoryBuffer(3).put(job("a"))


def test_samples_are_scored_in_the_order_they_came_and_retries_first() -> None:
    buffer = TrajectoryBuffer(8)
    for name in "abc":
        buffer.reserve(name)
        buffer.put(job(name))
    first = buffer.take("reward-0", 1)[0]
    buffer.retry(first)
    assert not buffer.being_scored("reward-0", "a")
    assert [j.sample_id for j in buffer.take("reward-0", 2)] == ["a", "b"]
    assert [j.sample_id for j in buffer.take("reward-0", 2)] == ["c"]
    assert buffer.take("reward-0", 2) == []


def test_validation_samples_go_first_and_the_others_can_be_left() -> None:
    buffer = TrajectoryBuffer(8)
    for name, kind in (("a", "train"), ("b", "validation"), ("c", "train"), ("d", "validation")):
        buffer.reserve(name)
        buffer.put(job(name, kind))  # type: ignore[arg-type]
    assert [j.sample_id for j in buffer.take("reward-0", 1, ["validation"])] == ["b"]
    assert buffer.queued("validation") and buffer.queued("train")
    assert [j.sample_id for j in buffer.take("reward-0", 2)] == ["d", "a"]
    assert not buffer.queued("validation")
    assert buffer.take("reward-0", 9, ["validation"]) == []
    assert buffer.statistics().ready == 1


def test_discarding_forgets_queued_samples_and_frees_their_slots() -> None:
    buffer = TrajectoryBuffer(4)
    for name in "abcd":
        buffer.reserve(name)
        if name != "d":
            buffer.put(job(name))
    buffer.take("reward-0", 1)
    buffer.discard({"a", "b", "x"})
    assert [j.sample_id for j in buffer.take("reward-0", 9)] == ["c"]
    assert buffer.statistics().reserved == 2


def test_releasing_twice_frees_one_place() -> None:
    buffer = TrajectoryBuffer(2)
    buffer.reserve("a")
    buffer.reserve("b")
    buffer.release("a")
    buffer.release("a")
    assert buffer.free == 1


# ---- replay ----------------------------------------------------------------------------------------------------------


def replay(capacity: int = 10, *, window: int = 1, max_updates: int = 1, groups_per_update: int = 1) -> ReplayBuffer:
    return ReplayBuffer(capacity, window=window, max_updates=max_updates, groups_per_update=groups_per_update)


def test_admitted_groups_keep_a_place_until_they_are_taken_or_end() -> None:
    buffer = replay(2)
    buffer.reserve(0, 0)
    buffer.reserve(1, 0)
    with pytest.raises(ValueError, match="no room for group 2: all 2 buffer slots are reserved"):
        buffer.reserve(2, 0)
    buffer.end(1)
    assert buffer.free == 1 and 1 not in buffer and 0 in buffer
    with pytest.raises(ValueError, match="group 1 has no buffer slot reserved"):
        buffer.put(group(1))
    buffer.put(group(0))
    assert (buffer.statistics().reserved, buffer.statistics().ready) == (1, 1)
    taken = buffer.take(0, 1)
    assert taken is not None and taken.group == 0
    assert buffer.free == 2


def test_all_are_ready_when_no_admitted_group_is_still_made() -> None:
    buffer = replay()
    assert buffer.all_ready
    for number in (0, 1):
        buffer.reserve(number, 0)
        buffer.put(group(number))
        assert buffer.all_ready
    buffer.reserve(2, 0)
    assert not buffer.all_ready
    buffer.take(0, 1)
    assert not buffer.all_ready
    buffer.end(2)
    assert buffer.all_ready


def test_a_strict_window_waits_for_the_oldest() -> None:
    buffer = replay(window=1)
    for number in (0, 1):
        buffer.reserve(number, 0)
    buffer.put(group(1))
    assert buffer.take(0, 1) is None
    buffer.end(0)
    taken = buffer.take(0, 1)
    assert taken is not None and taken.group == 1


def test_a_window_does_not_reach_beyond_its_size() -> None:
    buffer = replay(window=2, max_updates=5)
    for number in range(3):
        buffer.reserve(number, 0)
    buffer.put(group(2))
    assert buffer.take(0, 1) is None
    buffer.put(group(1))
    taken = buffer.take(0, 1)
    assert taken is not None and taken.group == 1


def test_overtaking_stops_where_the_overtaken_would_be_late() -> None:
    buffer = replay(window=3, max_updates=1, groups_per_update=2)
    for number in range(4):
        buffer.reserve(number, 0)
    buffer.put(group(1))
    buffer.put(group(2))
    assert [g.group for g in (buffer.take(0, 2), buffer.take(0, 1)) if g] == [1, 2], "0 and 3 still fit into update 1"
    for number in (4, 5):
        buffer.reserve(number, 1)
    buffer.put(group(4, 1))
    assert buffer.take(1, 2) is None, "0 and 3 fill update 1, and are due by then"


@settings(max_examples=150, deadline=None)
@given(
    window=st.integers(1, 5),
    max_updates=st.integers(0, 3),
    groups_per_update=st.integers(1, 3),
    dice=st.randoms(use_true_random=False),
)
def test_whatever_becomes_ready_when_no_group_is_ever_late(
    window: int, max_updates: int, groups_per_update: int, dice: object
) -> None:
    """Admits groups as slots allow; they become ready in any order, and the trainer takes as soon as it may."""
    buffer = replay(1000, window=window, max_updates=max_updates, groups_per_update=groups_per_update)
    slots = (max_updates + 1) * groups_per_update
    admitted: dict[int, int] = {}
    taken: set[int] = set()
    ready: set[int] = set()
    for update in range(6):
        for number in range(len(admitted), update * groups_per_update + slots):
            admitted[number] = update
            buffer.reserve(number, update)
        for needed in range(groups_per_update, 0, -1):
            while (chosen := buffer.take(update, needed)) is None:
                waiting = sorted(set(admitted) - ready)
                assert waiting, "everything is ready and nothing may be taken"
                number = dice.choice(waiting)  # type: ignore[attr-defined]
                ready.add(number)
                buffer.put(group(number, admitted[number]))
            assert update - admitted[chosen.group] <= max_updates
            assert sum(number < chosen.group for number in set(admitted) - taken) < window
            taken.add(chosen.group)
