"""Tests the table of samples against a plain model of it, under arbitrary events, and who gets which sample first; the
table of groups: slots, places and the order in which the trainer takes groups."""

from __future__ import annotations

import doctest
import random
from collections import Counter
from itertools import product
from typing import Any

import pytest
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
from omni_async.control.sample_table import (
    SAMPLE_TRANSITIONS,
    Failure,
    Sample,
    SampleEvent,
    SampleSet,
    SampleState,
    SampleTable,
)
from omni_async.types import LedgerEntry, SampleKind, SampleResult, Score, ScoreResult, UpdateReport
from tests.control.control_world import SAMPLE_BYTES, make_config, make_prompts, make_result

WITH_SLOT = {"LEASED", "ABANDONED", "GENERATED", "SCORING", "PAUSED"}
ENGINES = ("a", "b", "c")


class SampleWorld:
    """A table with groups and rounds of two samples each."""

    def __init__(self, **config: Any) -> None:
        usual = {"validation": {"every": 1, "samples_per_prompt": 1}, "score_retries": 1, "engines": 3}
        self.config = make_config(**usual | config)
        self.factory = RequestFactory(self.config)
        self.table = SampleTable(self.config)
        self.table.engines |= set(ENGINES)
        self.owners: list[SampleSet] = []
        self.restored = False

    def add(self, kind: SampleKind = "train") -> SampleSet:
        number, prompts = len(self.owners), make_prompts(2)
        requests = (
            self.factory.training(number, prompts[0], self.factory.window(number))
            if kind == "train"
            else self.factory.validation(number, tuple(prompts))
        )
        self.owners.append(SampleSet(kind, number, requests))
        self.table.add_samples(self.owners[-1])
        return self.owners[-1]

    def lease(self, engine: str = "a", free: int = 64) -> list[Sample]:
        return [self.table.samples[request.sample_id] for request in self.table.lease(engine, free, 64)]

    def generate(self, sample: Sample) -> None:
        assert self.table.answered(sample.engine, sample.request.sample_id) is sample
        self.table.generated(sample, made(sample, sample.engine))

    def add_generated(self, kind: SampleKind = "train") -> SampleSet:
        owner = self.add(kind)
        while leased := self.lease():
            for sample in leased:
                self.generate(sample)
        return owner

    def answer(self, worker: str, sample: Sample, how: str) -> list[str]:
        score, fault = (Score(1.0), "retry") if how == "score" else (None, how)
        result = ScoreResult(sample.request.sample_id, sample.request.attempt, score=score, fault=fault)  # type: ignore[arg-type]
        outcome = self.table.scored(worker, result)
        if isinstance(outcome, Failure):
            return [outcome.event]
        return [] if outcome is None else [type(outcome).__name__]


def made(sample: Sample, engine: str) -> SampleResult:
    size = sample.request.window.size if sample.request.window else 0
    return make_result(sample.request, engine, (0,) * size)


def ids(found: list[Sample]) -> list[str]:
    return [sample.request.sample_id for sample in found]


def test_validation_goes_first_then_the_oldest_group_and_each_engine_gets_an_even_share() -> None:
    world = SampleWorld()
    for _ in range(3):
        world.add()
    world.add("validation")
    assert ids(world.lease("a", 2)) == ["v3.p0.s0", "v3.p1.s0"]
    assert ids(world.lease("b")) == ["g0.s0", "g0.s1"], "six samples for three engines"
    lost = ids(world.lease("c"))
    assert lost == ["g1.s0", "g1.s1"]
    world.table.make_again(world.table.samples["g1.s0"])
    assert ids(world.lease("a", 2)) == ["g1.s0", "g2.s0"], "the oldest first, again"


def test_validation_has_its_share_of_an_engine_while_training_waits() -> None:
    world = SampleWorld(validation={"every": 1, "samples_per_prompt": 20, "share": 0.5}, trajectories=12)
    world.add("validation")
    world.add()
    for engine in ENGINES:
        expected = ["validation"] * 6 if engine == "c" else ["validation"] * 2 + ["train"]
        found = [sample.owner.kind for sample in world.lease(engine)]
        assert found == expected, "while training waits; then as many as there is room for"
    assert not world.table.may_lease


def test_validation_is_scored_first_then_what_came_first_and_what_is_tried_again_before_all() -> None:
    world = SampleWorld()
    training, round_ = world.add_generated(), world.add_generated("validation")
    last = world.add_generated()

    def jobs(limit: int) -> list[str]:
        return [job.sample_id for job in world.table.jobs("w", limit)]

    assert jobs(3) == [*ids([*round_.samples]), "g0.s0"]
    assert world.answer("w", training.samples[0], "retry") == ["Pause"]
    assert jobs(1) == ["g0.s1"]
    world.table.resume(training.samples[0])
    assert world.answer("w", training.samples[1], "outage") == []
    assert jobs(9) == ["g0.s0", *ids([*last.samples]), "g0.s1"], "behind all others, at no cost"
    assert list(world.table.worker_lost("w")) == [] and world.table.jobs("w", 9) == []
    again = world.table.jobs("other", 9)
    assert [job.sample_id for job in again] == ["v1.p0.s0"], "alone: it may be what the worker died of"


def test_kept_answers_are_counted_until_the_next_update() -> None:
    world = SampleWorld()
    world.add_generated()
    for job, cached in zip(world.table.jobs("w", 2), (1, 2), strict=True):
        result = ScoreResult(job.sample_id, job.attempt, score=Score(1.0), cached=cached)
        for _ in range(2):
            world.table.scored("w", result)
    assert world.table.cached == 3, "a second answer does not count"
    world.table.begin_update()
    assert world.table.cached == 0


def test_only_the_first_sample_that_a_scorer_is_down_for_may_have_brought_it_down() -> None:
    world = SampleWorld()
    first, second = (world.add_generated().samples for _ in range(2))
    world.table.jobs("w", 4)
    for sample, how in ((first[0], "score"), (first[1], "outage"), (second[0], "outage")):
        world.answer("w", sample, how)
    assert [sample.suspected for sample in (first[1], second[0])] == [1, 0]


def test_several_reward_workers_may_have_a_sample_and_the_first_score_counts() -> None:
    world = SampleWorld()
    (first, second) = world.add_generated().samples
    world.table.jobs("w0", 2)
    for worker in ("w1", "w2"):
        world.table.hand_out(first, worker)
    assert world.answer("w0", first, "retry") == [] and list(world.table.worker_lost("w1")) == []
    assert first.state is SampleState.SCORING and first.workers == ("w2",), "one of them has it still"
    assert world.answer("w0", first, "score") == [], "it has answered"
    assert world.answer("w2", first, "score") == [] and first.owner.num_missing == 1
    world.table.hand_out(second, "w2")
    assert world.answer("w2", second, "score") == ["Complete"] and world.answer("w0", second, "reject") == []


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([1, 3, 64]), st.sampled_from([0.1, 1.0]))
def test_counts_and_queues_always_agree_with_the_states(dice: random.Random, slots: int, share: float) -> None:
    validation = {"every": 1, "samples_per_prompt": 1, "share": share}
    world = SampleWorld(trajectories=slots, validation=validation, retries=2, max_bytes=100 * SAMPLE_BYTES)
    table, workers, ended = world.table, [0], set[int]()
    for _ in range(dice.randint(1, 80)):
        live = [*table.samples.values()]
        one = dice.choice(live) if live else None
        state = one.state.name if one else ""
        match dice.choice(
            ["add", "restore", "lease", "lease", "answer", "jobs", "score", "score", "score", "lose", "end", "worker"]
        ):
            case "add":
                world.add(dice.choice(["train", "train", "validation"]))
            case "restore":
                world.restored = True
                for sample in world.add().samples:
                    table.restore(sample, made(sample, "engine-of-before"), Score(0.5))
            case "lease":
                free = dice.randint(1, 5)
                before = [sample for sample in live if sample.state is SampleState.QUEUED]
                leased = world.lease(dice.choice(ENGINES), free)
                training = sorted((s for s in before if s.owner.kind == "train"), key=order)
                assert [s for s in leased if s.owner.kind == "train"] == training[: sum(s in training for s in leased)]
                assert len(leased) <= free and (leased or not before or slots == used(live))
            case "answer" if one and state == "LEASED":
                stranger = next(engine for engine in ENGINES if engine != one.engine)
                assert table.answered(stranger, one.request.sample_id) is None
                if dice.random() < 0.7:
                    world.generate(one)
                else:
                    table.generation_failed(one, "out of memory")
            case "answer" if one and state == "ABANDONED":
                assert table.answered(one.engine, one.request.sample_id) is None
                assert one.state is SampleState.GONE
            case "jobs":
                worker = f"w{workers[0]}"
                for job in table.jobs(worker, 3):
                    assert table.samples[job.sample_id].workers == (worker,)
            case "score" if one and state == "SCORING":
                how = dice.choice(["score", "score", "retry", "outage", "replace"])
                world.answer(one.workers[0], one, how)
                assert one.score is not None or how != "score"
            case "score" if one and state == "PAUSED":
                table.resume(one)
            case "lose" if one and one.result is not None and state != "FAILED":
                attempt = one.request.attempt
                table.make_again(one)
                assert (one.result, one.score, one.request.attempt) == (None, None, attempt + 1)
            case "end" if one and one.owner.number not in ended:
                ended.add(one.owner.number)
                table.end_samples(one.owner)
            case "worker":
                workers[0] += 1
                list(table.worker_lost(f"w{workers[0] - 1}"))
        agree(world)


def order(sample: Sample) -> tuple[int, int]:
    return sample.owner.number, sample.request.sample


def used(live: list[Sample]) -> int:
    return sum(sample.state.name in WITH_SLOT for sample in live)


def agree(world: SampleWorld) -> None:
    """Counts everything again from the states alone."""
    table, live = world.table, [*world.table.samples.values()]
    assert SampleState.GONE not in {sample.state for sample in live}
    statistics = table.statistics()
    assert statistics["reserved"] == used(live) <= statistics["capacity"]
    waiting = {s.request.sample_id for s in live if s.state is SampleState.GENERATED}
    assert {name for queue in table._to_score.values() for name in queue} == waiting
    assert statistics["ready"] == len(waiting)
    found = Counter((s.owner.kind, s.state) for s in live)
    for kind in ("train", "validation"):
        assert table._num_queued[kind] == found[kind, SampleState.QUEUED]  # type: ignore[index]
        at_engines = [s.engine for s in live if s.owner.kind == kind and s.state.name in ("LEASED", "ABANDONED")]
        assert table._num_leased[kind] == len(at_engines)  # type: ignore[index]
        for engine in ENGINES:
            assert table._num_leased_to[kind, engine] == at_engines.count(engine)  # type: ignore[index]
    for owner in world.owners:
        done = {SampleState.SCORED, SampleState.FAILED}
        assert not owner.samples or owner.num_missing == sum(s.state not in done for s in owner.samples)
    for sample in live:
        assert bool(sample.workers) == (sample.state is SampleState.SCORING)
    training = [s for s in live if s.owner.kind == "train"]
    made = sum(s.result is not None for s in training if s.state is not SampleState.FAILED)
    expected = sum(s.result is None for s in training if s.state is not SampleState.FAILED)
    share = SAMPLE_BYTES if world.table.images or world.restored else 100 * SAMPLE_BYTES // 4
    counted = table.bytes.statistics()
    assert (counted["ready"], counted["reserved"]) == (made * SAMPLE_BYTES, made * SAMPLE_BYTES + expected * share)
    queued = any(sample.state is SampleState.QUEUED for sample in live)
    assert table.may_lease == (queued and used(live) < statistics["capacity"])


# ---- groups ----------------------------------------------------------------------------------------------------------


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


def test_a_group_beyond_the_budget_is_never_handed_to_the_trainer() -> None:
    """No sequence of calls leads there: the table checks its own bound."""
    world = GroupWorld(S=1, P=1, groups=2)
    group = world.admit(0)
    world.complete(group)
    with pytest.raises(TooStale, match="group 0 reached the trainer 2 updates old, the budget is 1"):
        world.take(2, 1)
    assert world.counts() == (1, 0, 1, 1) and world.take(1, 1) == 0


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


def test_a_group_that_the_trainer_cannot_read_goes_before_all_others() -> None:
    world = GroupWorld(S=1, P=2, window=3)
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
    world = GroupWorld(S=2, P=2, window=3)
    groups = [world.admit(number) for number in range(4)]
    world.complete(*groups[1:3])
    assert [world.take(1, 2), world.take(1, 1)] == [1, 2], "0 and 3 still fit into update 2"
    world.complete(world.admit(4, 1))
    assert world.take(2, 2) is None, "0 and 3 fill update 2, and are due by then"


@settings(max_examples=150, deadline=None)
@given(window=st.integers(1, 5), S=st.integers(0, 3), P=st.integers(1, 3), dice=st.randoms(use_true_random=False))
def test_whatever_becomes_ready_when_no_group_is_ever_late(window: int, S: int, P: int, dice: random.Random) -> None:
    """Admits groups as slots allow; they become ready in any order, and the trainer takes as soon as it may."""
    world = GroupWorld(window=window, S=S, P=P)
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


def test_an_event_that_cannot_happen_is_refused() -> None:
    for state, event in {*product(SampleState, SampleEvent)} - SAMPLE_TRANSITIONS.keys():
        (sample, _) = (samples := SampleWorld()).add().samples
        sample.state = state
        with pytest.raises(ValueError, match=f"sample g0.s0 is {state.name}: {event.name} cannot happen to it"):
            samples.table._move(sample, event)
        assert sample.state is state
    for state, event in {*product(GroupState, GroupEvent)} - GROUP_TRANSITIONS.keys():
        group = (groups := GroupWorld()).admit(0)
        group.state = state
        with pytest.raises(ValueError, match=f"group 0 is {state.name}: {event.name} cannot happen to it"):
            groups.table._move(group, event)
        assert group.state is state
