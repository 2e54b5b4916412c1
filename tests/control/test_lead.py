"""Tests the time that a group is made, without its waits for older groups."""

from __future__ import annotations

import pytest

from omni_async.control.lead import Stage, Times, lead_s


class Line:
    """Engines and reward workers of one group at a time each, the oldest first; every group is a single sample."""

    def __init__(self) -> None:
        self.engines, self.workers = Stage(), Stage()
        self.engines_free = self.workers_free = 0.0

    def make(self, *moments: float, draws_s: float, judges_s: float) -> list[Times]:
        """Return the times of groups that are admitted at these moments."""
        groups = [Times() for _ in moments]
        events: list[tuple[float, int, str, Times]] = []
        for group, admitted in zip(groups, moments, strict=True):
            leased = max(admitted, self.engines_free)
            generated = self.engines_free = leased + draws_s
            taken = max(generated, self.workers_free)
            group.ready = self.workers_free = taken + judges_s
            moves = [(admitted, "admit"), (leased, "lease"), (generated, "generate"), (taken, "take")]
            # At equal times a sample leaves a stage before the next takes its place.
            order = ["generate", "ready", "admit", "lease", "take"]
            events += [(at, order.index(what), what, group) for at, what in [*moves, (group.ready, "ready")]]
        for now, _, what, group in sorted(events, key=lambda event: event[:2]):
            self.apply(what, group, now)
        return groups

    def apply(self, what: str, group: Times, now: float) -> None:
        match what:
            case "admit":
                group.admitted = now
                self.engines.change(1, 0, now)
            case "lease":
                group.leased(self.engines, now)
                self.engines.change(-1, 1, now)
            case "generate":
                self.engines.change(0, -1, now)
                self.workers.change(1, 0, now)
                group.generated(now)
            case "take":
                group.handed_out(self.workers, now)
                self.workers.change(-1, 1, now)
            case "ready":
                self.workers.change(0, -1, now)


@pytest.mark.parametrize("draws_s, judges_s", [(2.0, 1.0), (1.0, 3.0)])
def test_a_group_that_waits_for_nothing_takes_its_own_time(draws_s: float, judges_s: float) -> None:
    groups = Line().make(0.0, 10.0, 20.0, draws_s=draws_s, judges_s=judges_s)
    assert [lead_s([group]) for group in groups] == [draws_s + judges_s] * 3


@pytest.mark.parametrize("draws_s, judges_s", [(2.0, 1.0), (1.0, 3.0)])
def test_waits_for_older_groups_do_not_count(draws_s: float, judges_s: float) -> None:
    """Ten groups at once: the last is ready 10 times as late, but had to be admitted no earlier."""
    groups = Line().make(*[0.0] * 10, draws_s=draws_s, judges_s=judges_s)
    assert groups[-1].ready == 10 * max(draws_s, judges_s) + min(draws_s, judges_s)
    assert [lead_s([group]) for group in groups] == [draws_s + judges_s] * 10
    assert lead_s(groups) == groups[-1].ready, "together they need all that time"


def test_waits_for_anything_else_count() -> None:
    """Engines and reward workers are idle, but take the group late: after a validation round, or an outage."""
    line, group = Line(), Times()
    for now, what in enumerate(("admit", "lease", "generate", "take", "ready")):
        line.apply(what, group, 7.0 * now)
    group.ready = 28.0
    assert lead_s([group]) == 28.0


def test_a_long_generation_counts_although_the_first_sample_waited() -> None:
    """Its first sample waits 80 s for the reward workers meanwhile."""
    line, older, group = Line(), Times(), Times()
    line.engines.change(1, 0, 0.0)
    line.apply("lease", older, 0.0)
    line.apply("generate", older, 0.0)
    line.apply("take", older, 0.0)
    line.apply("admit", group, 0.0)
    line.apply("lease", group, 0.0)
    group.generated(10.0)
    line.workers.change(1, 0, 10.0)
    group.handed_out(line.workers, 90.0)
    group.generated(100.0)
    group.ready = 101.0
    assert lead_s([group]) == 100.0


def test_the_first_sample_of_a_group_counts_at_every_stage() -> None:
    """Two samples, one after the other, at stages that older groups use too."""
    line, group = Line(), Times()
    line.engines.change(0, 1, 0.0)
    line.workers.change(0, 1, 0.0)
    group.admitted = 0.0
    for second in (1.0, 6.0):
        group.leased(line.engines, second)
        group.generated(second + 2)
        group.handed_out(line.workers, second + 3)
    group.ready = 11.0
    assert lead_s([group]) == 9.0, "from 1 to 11, without the first sample's wait for a reward worker"
    other = Times()
    other.begun, other.behind_s, other.ready = 1.0, 5.0, 11.0
    other.generated(5.0)
    assert lead_s([group, other]) == 9.0, "the wait of the group that was generated first"


def test_groups_of_an_earlier_attempt_have_no_lead() -> None:
    assert lead_s([Times()]) is None and lead_s([]) is None


def test_a_stage_counts_the_time_without_waiting_samples() -> None:
    stage = Stage()
    assert stage.spare_s(5.0) == 5.0
    stage.change(2, 0, 5.0)
    stage.change(-1, 1, 6.0)
    assert stage.spare_s(9.0) == 5.0
    stage.change(-1, 1, 9.0)
    assert stage.spare_s(12.0) == 8.0
