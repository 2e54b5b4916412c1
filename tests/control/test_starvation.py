"""Tests the bound on starvation: an update waits no longer than its groups are later than admission expects."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

import pytest

from omni_async.config import Config
from omni_async.control.admission import JustInTime
from tests.control.test_admission import Line, P, config

MEASURED = 12  # updates; the groups of later ones are admitted by measured times


class Judged(JustInTime):
    """A policy that notes for each group by how many seconds it is ready later than expected at its admission."""

    def __init__(self, job: Config, *, collects: bool) -> None:
        super().__init__(job, collects=collects)
        self.expected: dict[int, float] = {}
        self.lately: deque[float] = deque(maxlen=2)  # what it expected in this update and the one before
        self.late_s: list[float] = []

    def admitted(self, group: int, now: float) -> None:
        super().admitted(group, now)
        self.expected[group] = now + min([self._ahead_s, *self.lately])

    def _learn(self) -> None:
        self.lately.append(self._ahead_s)
        super()._learn()

    def completed(self, group: int, now: float) -> None:
        super().completed(group, now)
        self.late_s.append(max(0.0, now - self.expected[group]))


@pytest.mark.parametrize("collects", [False, True])
@pytest.mark.parametrize("reserve", ["auto", 0, P])
@pytest.mark.parametrize("seed", range(8))
def test_an_update_waits_no_longer_than_its_groups_are_late(seed: int, reserve: Any, collects: bool) -> None:
    dice = Random(seed)
    mean_s, spread = dice.uniform(0.5, 8), dice.choice([0.1, 0.5, 1.0])
    leads = [mean_s * dice.lognormvariate(0, spread) for _ in range(997)]
    policy = Judged(config(reserve=reserve), collects=collects)
    line = Line(policy, *leads, each_s=dice.uniform(0.5, 2))
    line.train(MEASURED)
    starved = 0.0
    for update in range(MEASURED, 60):
        line.train(1)
        if update > MEASURED:  # the pace is that of the update before
            assert policy.pace.starved_s <= sum(policy.late_s[(update - 1) * P : update * P]) + 0.01
        starved += policy.pace.starved_s
    assert starved <= line.waited_s
    if reserve == 0:
        assert starved > 0, "half of the groups are later than the median"
