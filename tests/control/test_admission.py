"""Tests the policy that admits groups just in time."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_async.config import Config
from omni_async.control.admission import JustInTime, Pace
from omni_async.control.lead import Times
from tests.support.configs import build

P = 4


def config(**staleness: Any) -> Config:
    return build({"staleness": {"max_updates": 8, **staleness}, "trainer": {"groups_per_update": P}})


def made(begun: float, ready: float) -> Times:
    """Return the times of a group that waited for no other."""
    times = Times()
    times.admitted = times.begun = begun
    times.first_generated = times.last_generated = times.ready = ready
    times.behind_s = 0.0
    return times


class Line:
    """A job: groups are ready `leads_s` after their admission, in turn, and each is trained in `each_s`.

    A trainer that collects works `P * each_s` on an update once it has its groups. `outage` is a span of time without
    a ready group. `rejected`: share of the groups, drawn at random, that are rejected once they have all scores."""

    def __init__(
        self,
        policy: JustInTime,
        *leads_s: float,
        each_s: float = 1.0,
        outage: tuple[float, float] = (0, 0),
        rejected: float = 0.0,
    ) -> None:
        self.policy, self.leads_s, self.each_s, self.outage = policy, cycle(leads_s), each_s, outage
        self.rejected, self.dice = rejected, Random(0)
        self.useless: list[float] = []  # when groups will be rejected
        self.collects = policy._collects
        self.spare_s: Callable[[float], float] = lambda now: now  # of the reward workers
        self.now = 0.0
        self.waiting: list[tuple[Times, int]] = []  # a group and its version
        self.version = self.number = 0
        self.ages: list[int] = []
        self.waited_s = 0.0

    def admit_until(self, then: float) -> None:
        """Admit the groups that are due, until a moment."""
        while True:
            making = sum(group.ready > self.now for group, _ in self.waiting)
            room = len(self.waiting) + len(self.useless) < 9 * P
            ready_groups = len(self.waiting) - making
            due = self.policy.due(making + len(self.useless), ready_groups, self.now) if room else math.inf
            if (rejection := min(self.useless, default=math.inf)) <= min(due, then):
                self.now = max(self.now, rejection)
                self.useless.remove(rejection)
                self.policy.ended()
                continue
            if due > then:
                self.now = then
                return
            self.now = max(self.now, due)
            ready = self.now + next(self.leads_s)
            begins, ends = self.outage
            if begins <= ready < ends:
                ready = ends
            self.number += 1
            if self.rejected and self.dice.random() < self.rejected:
                self.useless.append(ready)
            else:
                self.waiting.append((made(self.now, ready), self.version))

    def train(self, updates: int) -> None:
        for _ in range(updates):
            taken = 0
            while taken < P:
                self.policy.asked(self.version, P - taken, (self.now, self.spare_s(self.now)), self.now)
                self.admit_until(self.now)
                asked = self.now
                while not self.waiting:
                    self.admit_until(min(self.useless))
                self.admit_until(max(self.now, self.waiting[0][0].ready))
                self.waited_s += self.now - asked
                group, version = self.waiting.pop(0)
                self.policy.taken(group, self.now)
                self.ages.append(self.version - version)
                taken += 1
                if not self.collects or taken == P:
                    self.admit_until(self.now + self.each_s * (P if self.collects else 1))
            self.version += 1


@pytest.mark.parametrize("collects", [False, True])
@pytest.mark.parametrize("lead_s", [0.5, 3.0, 9.0])
def test_groups_are_as_young_as_the_lead_allows(lead_s: float, collects: bool) -> None:
    line = Line(JustInTime(config(), collects=collects), lead_s)
    line.train(40)
    late = line.ages[10 * P :]
    assert max(late) <= math.ceil(lead_s / P) + 1 < 8
    started, line.now = line.now, line.now
    line.train(10)
    assert line.now - started == pytest.approx(10 * P * 1.0), "the trainer never waits"
    assert line.policy.pace.starved_s == 0


def test_a_trainer_that_begins_to_collect_soon_waits_no_more() -> None:
    line = Line(JustInTime(config(), collects=False), 3.0)
    line.train(30)
    line.policy.trainer_collects(True)
    line.collects = True
    line.train(10)
    started, waited_s = line.now, line.waited_s
    line.train(20)
    assert line.now - started == pytest.approx(20 * P * 1.0) and line.waited_s == waited_s
    assert max(line.ages[-10 * P :]) <= 2


def test_every_slot_is_used_where_the_trainer_always_waits() -> None:
    line = Line(JustInTime(config(), collects=False), 100.0, each_s=0.01)
    line.train(20)
    assert len(line.waiting) == 9 * P


@pytest.mark.parametrize("reserve", [4, 12])
def test_a_reserve_is_admitted_that_much_earlier(reserve: int) -> None:
    """An outage shorter than the reserve costs the trainer nothing; a longer one the rest, and it is reported."""
    for outage_s in (reserve * 1.0 - 1, reserve * 1.0 + 3):
        policy = JustInTime(config(reserve=reserve), collects=False)
        line = Line(policy, 2.0, outage=(200.0, 200.0 + outage_s))
        line.train(100)
        lost = line.waited_s - 2.0  # the first group's lead is lost in any case
        assert max(0.0, outage_s - reserve - 3) <= lost <= max(0.0, outage_s - reserve) + 1.1


def test_the_wait_for_withheld_groups_is_reported() -> None:
    policy = JustInTime(config(reserve=0), collects=False)
    line = Line(policy, 2.0, outage=(200.0, 230.0))
    line.spare_s = lambda now: min(now, 200.0) + max(0.0, now - 230.0)  # they had time before the outage
    starved = 0.0
    for _ in range(100):
        line.train(1)
        starved += policy.pace.starved_s
    assert 25 < starved <= line.waited_s - 2.0, "not the wait for the first group, when nothing was withheld"


def test_waits_are_no_price_where_samples_always_wait_for_another_stage() -> None:
    """Another group would have waited for the reward workers too."""
    policy = JustInTime(config(reserve=0), collects=False)
    line = Line(policy, 2.0, outage=(200.0, 230.0))
    line.spare_s = lambda now: 0.0
    for _ in range(100):
        line.train(1)
        assert policy.pace.starved_s == 0
    assert line.waited_s > 25


@pytest.mark.parametrize(
    "keys",
    [
        {"staleness.max_updates": 0},
        {"staleness.exact": True},
        {"staleness.reserve": "all"},
        {"placement.colocated": True},
        {"reward.streaming": False},
    ],
    ids=str,
)
def test_nothing_is_withheld_without_need(keys: dict[str, Any]) -> None:
    policy = JustInTime(
        build({"staleness": {"max_updates": 8}, "trainer": {"groups_per_update": P}}, keys), collects=False
    )
    line = Line(policy, 2.0)
    line.train(10)
    assert all(policy.due(making, 100, line.now) == line.now for making in range(100))
    assert (policy.pace.lead_s, policy.pace.work_s, policy.pace.reserve_s) == (pytest.approx(2.0), 4.0, 0.0)


def test_the_longest_recent_lead_counts_and_is_forgotten() -> None:
    """One of 40 groups is late: the trainer does not wait for it again, until no such group was seen for long."""
    policy = JustInTime(config(), collects=False)
    line = Line(policy, *[2.0] * 39, 9.0)
    line.train(20)
    waited = line.waited_s
    line.train(20)
    assert line.waited_s == waited
    assert policy.pace == Pace(pytest.approx(2.0), 4.0, pytest.approx(1.5 * 7.0), 0.0)
    line.leads_s = cycle([2.0])
    line.train(20)
    assert policy.pace.reserve_s == pytest.approx(0.0, abs=1e-6)


def test_a_collected_update_is_ready_with_its_last_group() -> None:
    policy = JustInTime(config(), collects=True)
    line = Line(policy, 2.0, 3.0, 5.0, 2.0)
    line.train(20)
    assert policy.pace.lead_s == pytest.approx(5.0) and policy.pace.starved_s == 0


def test_memory_spans_a_validation_round() -> None:
    rounds = build(
        {"staleness": {"max_updates": 8}, "trainer": {"groups_per_update": P}},
        {"validation.every": 30, "validation.prompts": "v.txt"},
    )
    for job, updates in ((config(), 16), (rounds, 31)):
        policy = JustInTime(job, collects=True)
        line = Line(policy, *[9.0] * P, *[2.0] * P * 1000)
        line.train(updates)
        assert policy.pace.reserve_s > 0
        line.train(4)
        assert policy.pace.reserve_s == pytest.approx(0.0, abs=1e-6)


def test_work_counts_as_short_as_it_may_be() -> None:
    """Nine of ten updates take 40 s, one takes 4 s: groups are there for the short one."""
    line = Line(policy := JustInTime(config(), collects=False), 2.0)
    for number in range(40):
        line.each_s = 1.0 if number % 8 == 0 else 10.0
        line.train(1)
    assert policy.pace.work_s == 4.0


def test_a_trainer_that_is_late_gets_no_more_groups_meanwhile() -> None:
    """A checkpoint takes 1000 s: the groups that were due before it wait, and no others."""
    line = Line(policy := JustInTime(config(), collects=False), 2.0)
    line.train(10)
    before = line.number
    line.admit_until(line.now + 1000)
    assert line.number - before <= P
    assert policy.due(0, P, line.now) == math.inf


def test_few_groups_are_admitted_before_anything_is_measured() -> None:
    policy = JustInTime(config(), collects=False)
    assert policy.due(3 * P - 1, 0, 7.0) <= 7.0
    assert policy.due(3 * P, 0, 7.0) == math.inf
    policy.asked(0, P, (7.0, 7.0), 7.0)
    policy.taken(Times(), 7.0)
    assert policy.due(3 * P - 1, 0, 7.0) == math.inf, "a group in training counts"


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_rejected_groups_hardly_starve_the_trainer(share: float) -> None:
    line = Line(JustInTime(config(), collects=False), 10.0, each_s=2.5, rejected=share)
    line.train(20)
    started, waited_s = line.now, line.waited_s
    line.train(200)
    assert line.waited_s - waited_s < 0.02 * (line.now - started)
    assert sum(line.ages[20 * P :]) / (200 * P) < 3


def test_more_groups_are_admitted_where_some_are_rejected() -> None:
    """Half of all groups teach nothing: twice as many are on their way, so that the trainer does not wait."""
    policies = [JustInTime(config(), collects=False) for _ in range(2)]
    for policy, rejected in zip(policies, (False, True), strict=True):
        line = Line(policy, 6.0)
        for _ in range(20):
            line.train(1)
            for _ in range(P * rejected):
                policy.ended()
    never, often = policies
    assert never.due(12, 0, line.now) > line.now == often.due(12, 0, line.now)
    assert often.due(0, 12, line.now) == never.due(0, 12, line.now)


steps = st.lists(
    st.tuples(st.sampled_from(["admit", "ready", "reject", "take", "ask"]), st.floats(0, 50)), max_size=120
)


@given(steps, st.booleans(), st.one_of(st.just("auto"), st.integers(0, 5)))
def test_a_trainer_that_waits_for_nothing_under_way_gets_a_group(
    events: list[tuple[str, float]], collects: bool, reserve: Any
) -> None:
    """No order of events can stop a run: a group is due at once if the trainer waits and no group is on its way."""
    policy, now, version, taken = JustInTime(config(reserve=reserve), collects=collects), 0.0, 0, 0
    making: list[float] = []
    ready: list[Times] = []
    waits = False
    for event, seconds in events:
        now += seconds
        due = policy.due(len(making), len(ready), now)
        assert not math.isnan(due)
        if event == "admit" and due <= now:
            making.append(now)
        elif event == "ready" and making:
            ready.append(made(making.pop(0), now))
        elif event == "reject" and making:
            making.pop(0)
            policy.ended()
        elif event == "ask" and not waits:
            if taken == P:
                version, taken = version + 1, 0
            policy.asked(version, P - taken, (now, now), now)
            waits = True
        elif event == "take" and waits and ready:
            policy.taken(ready.pop(0), now)
            taken, waits = taken + 1, False
        if waits and not making and not ready:
            assert policy.due(0, 0, now) <= now
