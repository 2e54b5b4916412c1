"""Slots bound how far generation runs ahead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_async.control.admission import Slots


def test_there_are_s_plus_one_times_p_slots() -> None:
    slots = Slots(max_updates=2, groups_per_update=3)
    for group in range(9):
        slots.take(group)
    assert slots.free == 0
    with pytest.raises(ValueError, match="no slot for group 9: all 9 are held"):
        slots.take(9)


def test_a_group_that_ended_frees_its_slot_at_once() -> None:
    slots = Slots(0, 1)
    slots.take(0)
    slots.end(0)
    assert slots.free == 1
    slots.take(1)


def test_a_trained_group_keeps_its_slot_until_its_version_is_held() -> None:
    slots = Slots(1, 1)
    slots.take(0)
    slots.take(1)
    slots.trained(0, 1)
    slots.trained(1, 2)
    assert slots.free == 0 and slots.live == set()
    assert slots.held(0) == 0
    assert slots.held(1) == 1
    assert slots.free == 1
    assert slots.held(2) == 1
    assert slots.statistics().free == 2


def test_no_group_holds_two_slots() -> None:
    slots = Slots(1, 2)
    slots.take(0)
    with pytest.raises(ValueError, match="group 0 already holds a slot"):
        slots.take(0)
    slots.trained(0, 1)
    with pytest.raises(ValueError, match="group 0 already holds a slot"):
        slots.take(0)


def test_only_live_groups_end() -> None:
    slots = Slots(1, 2)
    with pytest.raises(KeyError):
        slots.end(0)
    slots.take(0)
    slots.trained(0, 1)
    with pytest.raises(KeyError):
        slots.end(0)


@given(
    max_updates=st.integers(0, 3),
    groups_per_update=st.integers(1, 3),
    moves=st.lists(st.tuples(st.sampled_from(["take", "trained", "end", "held"]), st.integers(0, 50))),
)
def test_held_slots_are_always_live_groups_plus_unpublished_ones(
    max_updates: int, groups_per_update: int, moves: list[tuple[str, int]]
) -> None:
    slots = Slots(max_updates, groups_per_update)
    live: set[int] = set()
    unpublished: dict[int, int] = {}
    version = 0
    for group, (move, pick) in enumerate(moves):
        if move == "take" and slots.free:
            slots.take(group)
            live.add(group)
        elif move == "held":
            assert slots.held(version - 1) == sum(v <= version - 1 for v in unpublished.values())
            unpublished = {g: v for g, v in unpublished.items() if v > version - 1}
        elif live and move in ("trained", "end"):
            chosen = sorted(live)[pick % len(live)]
            live.remove(chosen)
            if move == "end":
                slots.end(chosen)
            else:
                version += 1
                slots.trained(chosen, version)
                unpublished[chosen] = version
        statistics = slots.statistics()
        assert slots.live == live
        assert (statistics.live, statistics.awaiting_publication) == (len(live), len(unpublished))
        assert (
            statistics.free == slots.free == (max_updates + 1) * groups_per_update - len(live) - len(unpublished) >= 0
        )
