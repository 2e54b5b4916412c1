"""Tests the bound on starvation: an update waits no longer than its groups are later than admission expects."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from omni_async.control.admission import JustInTime
from omni_async.control.lead import Times
from tests.control.test_admission import Line, P, config

MEASURED = 12  # updates; the groups of later ones are admitted by measured times


class Judged(JustInTime):
    """A policy that adds up for each update by how many seconds its groups are ready later than it expected.

    A group that is admitted in an update is expected with that update's lead or the one before, if that is shorter."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.expected_s = [(0.0, 0.0)]  # since when
        self.late_s = [0.0]  # per update

    def asked(self, version: int, needed: int, spare_s: tuple[float, ...], now: float) -> None:
        self.late_s += [0.0] * (version + 1 - len(self.late_s))
        super().asked(version, needed, spare_s, now)
        if self._ahead_s != self.expected_s[-1][1]:
            self.expected_s.append((now, self._ahead_s))

    def taken(self, group: Times, now: float) -> None:
        expected = [seconds for since, seconds in self.expected_s if since <= group.admitted][-2:]
        self.late_s[-1] += max(0.0, group.ready - group.admitted - min(expected))
        super().taken(group, now)


@pytest.mark.parametrize("collects", [False, True])
@pytest.mark.parametrize("reserve", ["auto", 0, P])
@pytest.mark.parametrize("seed", range(8))
def test_an_update_waits_no_longer_than_its_groups_are_late(seed: int, reserve: Any, collects: bool) -> None:
    dice = Random(seed)
    mean_s, spread = dice.uniform(0.5, 8), dice.choice([0.1, 0.5, 1.0])
    leads = [mean_s * dice.lognormvariate(0, spread) for _ in range(997)]
    policy = Judged(config(reserve=reserve), collects=collects)
    line = Line(policy, *leads, each_s=dice.uniform(0.5, 2))
    line.train(MEASURED + 1)
    starved = 0.0
    for update in range(MEASURED, 60):
        line.train(1)  # the pace is that of the update before
        assert policy.pace.starved_s <= policy.late_s[update] + 0.01
        starved += policy.pace.starved_s
    assert starved <= line.waited_s
    if reserve == 0:
        assert starved > 0, "half of the groups are later than the median"
