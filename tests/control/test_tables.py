"""Tests who gets which sample first; and slots, places and the order in which the trainer takes groups."""

from __future__ import annotations

import doctest
from collections.abc import Sequence
from itertools import product

import pytest

from omni_async.control.group import GROUP_TRANSITIONS, Group, GroupEvent, GroupState, has_signal
from omni_async.control.group_table import GroupTable
from omni_async.control.ledger import Ledger
from omni_async.control.requests import RequestFactory
from omni_async.control.sample import SAMPLE_TRANSITIONS, SampleEvent, SampleState
from omni_async.types import LedgerEntry, SampleRequest, Score, ScoreJob, UpdateReport
from tests.control.control_world import Bench, make_config, make_prompts, make_result, now


def ids(found: Sequence[SampleRequest | ScoreJob]) -> list[str]:
    return [sample.sample_id for sample in found]


def test_validation_goes_first_then_the_oldest_group_and_each_engine_gets_an_even_share() -> None:
    bench = Bench(S=0, P=3, engines=3, validation={"every": 1})
    assert ids(bench.lease(2)) == ["v0.p0.s0", "v0.p1.s0"]
    assert ids(bench.lease(64, "rollout-1")) == ["g0.s0", "g0.s1"], "six samples for three engines"
    assert ids(bench.lease(64, "rollout-2")) == ["g1.s0", "g1.s1"]
    now(bench.c.engine_lost("rollout-2", "killed"))
    assert ids(bench.lease(3)) == ["g1.s0", "g1.s1", "g2.s0"], "the oldest first, again"


def test_validation_has_its_share_of_an_engine_while_training_waits() -> None:
    validation = {"every": 1, "samples_per_prompt": 20, "share": 0.5}
    bench = Bench(S=0, P=1, engines=3, trajectories=12, validation=validation)
    for engine in range(3):
        expected = ["validation"] * 6 if engine == 2 else ["validation"] * 2 + ["train"]
        found = [request.kind for request in bench.lease(64, f"rollout-{engine}", 64)]
        assert found == expected, "while training waits; then as many as there is room for"


def test_validation_is_scored_first_then_what_came_first_and_what_is_tried_again_before_all() -> None:
    bench = Bench(S=0, P=2, validation={"every": 1})
    bench.make(bench.lease())
    *_, job = jobs = bench.jobs(3)
    assert ids(jobs) == ["v0.p0.s0", "v0.p1.s0", "g0.s0"]
    bench.fail(job)
    (job,) = bench.jobs(1)
    assert job.sample_id == "g0.s0"
    bench.fail(job, fault="outage")
    assert ids(bench.jobs()) == ["g0.s1", "g1.s0", "g1.s1", "g0.s0"], "behind all others, at no cost"


class GroupWorld:
    def __init__(self, **config: int) -> None:
        self.config = make_config(updates=50, **config)
        self.factory = RequestFactory(self.config)
        self.entries: list[LedgerEntry] = []
        self.table = GroupTable(self.config, "run-1", Ledger(self.entries.append), 0)

    def make(self, number: int, version: int = 0) -> Group:
        prompt, window = make_prompts(1)[0], self.factory.window(number)
        return Group(number, prompt, window, version, self.factory.training(number, prompt, window))

    def admit(self, number: int, version: int = 0) -> Group:
        group = self.make(number, version)
        self.table.admit(group)
        return group

    def score(self, group: Group) -> None:
        for sample in group.samples:
            sample.result = make_result(sample.request, "rollout-0", (group.admitted_version,) * 2)
            sample.score = Score(1.0)

    def complete(self, *groups: Group) -> None:
        for group in groups:
            self.score(group)
            self.table.complete(group)

    def take(self, update: int, needed: int) -> int | None:
        ready = self.table.take(update, needed)
        return None if ready is None else ready.group

    def counts(self) -> tuple[int, int, int, int]:
        """Returns slots of live groups and of others, places, and groups that can be taken."""
        found = self.table.statistics()
        slots, replay = found["slots"], found["replay"]
        return slots["live"], slots["awaiting_publication"], replay["reserved"], replay["ready"]


def test_the_example_of_the_group_table_is_right() -> None:
    world = GroupWorld(S=1, P=1, groups=2)
    first, second = world.make(0), world.make(1)
    world.score(first)
    names = {
        "table": world.table,
        "first": first,
        "second": second,
        "ready": first.make_ready(),
        "report": UpdateReport(1, (0,), {}, 0.0, 1.0),
        "held": lambda: (len(world.table.groups), world.counts()[2]),
    }
    example = doctest.DocTestParser().get_doctest(GroupTable.__doc__ or "", names, "GroupTable", None, None)
    assert len(example.examples) == 8
    assert doctest.DocTestRunner().run(example).failed == 0


def test_a_group_holds_a_slot_until_it_is_published_and_a_place_until_it_is_taken() -> None:
    world = GroupWorld(S=0, P=2, groups=2)
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


def test_overtaking_stops_where_the_overtaken_would_be_late() -> None:
    world = GroupWorld(S=2, P=2, window=3)
    groups = [world.admit(number) for number in range(4)]
    world.complete(*groups[1:3])
    assert [world.take(1, 2), world.take(1, 1)] == [1, 2], "0 and 3 still fit into update 2"
    world.complete(world.admit(4, 1))
    assert world.take(2, 2) is None, "0 and 3 fill update 2, and are due by then"


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


def test_an_event_that_cannot_happen_is_refused() -> None:
    for state, event in {*product(SampleState, SampleEvent)} - SAMPLE_TRANSITIONS.keys():
        sample = (bench := Bench()).c._samples.samples[bench.lease(1)[0].sample_id]
        sample.state = state
        with pytest.raises(ValueError, match=f"sample g0.s0 is {state.name}: {event.name} cannot happen to it"):
            bench.c._samples._move(sample, event)
        assert sample.state is state
    for state, event in {*product(GroupState, GroupEvent)} - GROUP_TRANSITIONS.keys():
        group = (groups := GroupWorld()).admit(0)
        group.state = state
        with pytest.raises(ValueError, match=f"group 0 is {state.name}: {event.name} cannot happen to it"):
            groups.table._move(group, event)
        assert group.state is state
