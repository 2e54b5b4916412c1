"""Tests the table of groups: slots, places and the order in which the trainer takes groups."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import product

import pytest
from control_world import make_config, make_prompts, make_result
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_async.control.group_table import (
    GROUP_TRANSITIONS,
    Group,
    GroupEvent,
    GroupState,
    GroupTable,
    TooStale,
    has_signal,
)
from omni_async.control.ledger import Ledger
from omni_async.control.requests import RequestFactory
from omni_async.types import LedgerEntry, Score, UpdateReport


class World:
    def __init__(self, **config: int) -> None:
        self.config = make_config(updates=50, **config)
        self.factory = RequestFactory(self.config)
        self.entries: list[LedgerEntry] = []
        self.table = GroupTable(self.config, "run-1", Ledger(self.entries.append), 0)

    def admit(self, number: int, version: int = 0) -> Group:
        prompt, window = make_prompts(1)[0], self.factory.window(number)
        group = Group(number, prompt, window, version, self.factory.training(number, prompt, window))
        self.table.admit(group)
        return group

    def complete(self, *groups: Group) -> None:
        for group in groups:
            for sample in group.samples:
                sample.result = make_result(sample.request, "rollout-0", (group.admitted_version,) * 2)
                sample.score = Score(1.0)
            self.table.complete(group)

    def take(self, update: int, needed: int) -> int | None:
        ready = self.table.take(update, needed)
        return None if ready is None else ready.group

    def counts(self) -> tuple[int, int, int, int]:
        """Returns slots of live groups and of others, places, and groups that can be taken."""
        found = self.table.statistics()
        slots, replay = found["slots"], found["replay"]
        return slots["live"], slots["awaiting_publication"], replay["reserved"], replay["ready"]


def test_an_event_that_cannot_happen_is_refused() -> None:
    for state, event in {*product(GroupState, GroupEvent)} - GROUP_TRANSITIONS.keys():
        group = (world := World()).admit(0)
        group.state = state
        with pytest.raises(ValueError, match=f"group 0 is {state.name}: {event.name} cannot happen to it"):
            world.table._move(group, event)
        assert group.state is state


def test_a_group_holds_a_slot_until_it_is_published_and_a_place_until_it_is_taken() -> None:
    world = World(S=0, P=2, groups=2)
    first, second = world.admit(0), world.admit(1)
    with pytest.raises(ValueError, match="no room for group 2: 2 of 2 slots and 2 of 2 places are held"):
        world.admit(2)
    world.complete(first)
    assert world.counts() == (2, 0, 2, 1) and not world.table.all_ready
    assert world.take(0, 2) == 0 and world.table.in_training
    assert world.counts() == (2, 0, 1, 0) and not world.table.may_admit
    assert world.table.end(second, "rejected", "equal") is None
    assert world.table.may_admit and world.table.all_ready, "its slot is free at once"
    ((group, ready),) = world.table.trained(UpdateReport(1, (0,), {}, 0.0, 1.0))
    assert (group, ready.group) == (first, 0) and first.ready is None
    assert world.counts() == (0, 1, 0, 0) and not world.table.in_training
    world.table.publish(0)
    assert world.counts() == (0, 1, 0, 0), "not every engine holds version 1"
    world.table.publish(1)
    assert world.counts() == (0, 0, 0, 0) and not world.table.groups
    assert [(entry.group, entry.event, entry.staleness) for entry in world.entries] == [
        (1, "rejected", None),
        (0, "trained", 0),
    ]


def test_a_group_that_the_trainer_cannot_read_goes_before_all_others() -> None:
    world = World(S=1, P=2, window=3)
    groups = [world.admit(number) for number in range(3)]
    world.complete(*groups)
    world.table.spoil(groups[1])
    assert world.counts() == (3, 0, 3, 2) and groups[1].ready is None
    assert world.take(0, 2) == 0
    assert world.table.give_back(0) is groups[0] and world.table.give_back(0) is None
    assert world.counts() == (3, 0, 2, 1), "it keeps its slot, and needs no place"
    assert world.take(0, 2) is None, "group 2 waits for it, however ready"
    world.complete(groups[0])
    world.table.spoil(groups[0])
    assert groups[0].state is GroupState.REMAKING and world.take(0, 2) is None
    world.complete(groups[0])
    assert [world.take(0, 2), world.take(0, 1)] == [0, 2]
    world.complete(groups[1])
    assert world.table.all_ready
    world.table.give_back(2)
    assert not world.table.all_ready, "it is made again"


def test_overtaking_stops_where_the_overtaken_would_be_late() -> None:
    world = World(S=2, P=2, window=3)
    groups = [world.admit(number) for number in range(4)]
    world.complete(*groups[1:3])
    assert [world.take(1, 2), world.take(1, 1)] == [1, 2], "0 and 3 still fit into update 2"
    world.complete(world.admit(4, 1))
    assert world.take(2, 2) is None, "0 and 3 fill update 2, and are due by then"


def test_a_group_beyond_the_budget_is_a_bug_that_is_found() -> None:
    world = World(S=1, P=1)
    world.complete(world.admit(0))
    with pytest.raises(TooStale, match="group 0 reached the trainer 2 updates old, the budget is 1"):
        world.table.take(2, 1)


@settings(max_examples=150, deadline=None)
@given(window=st.integers(1, 5), S=st.integers(0, 3), P=st.integers(1, 3), dice=st.randoms(use_true_random=False))
def test_whatever_becomes_ready_when_no_group_is_ever_late(window: int, S: int, P: int, dice: random.Random) -> None:
    """Admits groups as slots allow; they become ready in any order, and the trainer takes as soon as it may."""
    world = World(window=window, S=S, P=P)
    taken: set[int] = set()
    admitted = 0
    for update in range(6):
        world.table.publish(update)
        while world.table.may_admit:
            world.admit(admitted, update)
            admitted += 1
        groups = []
        for needed in range(P, 0, -1):
            while (chosen := world.take(update, needed)) is None:
                waiting = [group for group in world.table.groups.values() if group.state is GroupState.MAKING]
                assert waiting, "everything is ready and nothing may be taken"
                world.complete(dice.choice(waiting))
            assert update - world.table.groups[chosen].admitted_version <= S
            assert sum(number < chosen for number in set(range(admitted)) - taken) < window
            taken.add(chosen)
            groups.append(chosen)
        world.table.trained(UpdateReport(update + 1, tuple(groups), {}, 0.0, 1.0))
        assert world.table.live == set(range(admitted)) - taken


CANCELLING = [Score(1.0, values=(1.0, 0.0)), Score(1.0, values=(0.0, 1.0))]


@pytest.mark.parametrize(
    ("scores", "each_scorer", "expected"),
    [
        *(([Score(value) for value in equal], False, False) for equal in ((0.1, 0.1, 0.1), (0.5,), ())),
        *(([Score(value) for value in other], False, True) for other in ((0.1, 0.1, 0.10000001), (0.0, 0.0, 1e-12))),
        pytest.param(CANCELLING, False, False, id="scorers cancel out"),
        pytest.param(CANCELLING, True, True, id="each scorer counts"),
    ],
)
def test_any_difference_of_rewards_is_signal(scores: list[Score], each_scorer: bool, expected: bool) -> None:
    assert has_signal(scores, each_scorer=each_scorer) == expected


def test_it_needs_no_torch() -> None:
    code = "import sys, omni_async.control.group_table; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
