"""Tests how long stages are said to have taken from update to update."""

from __future__ import annotations

from typing import Any

import pytest

from omni_async.records.write.stages import FirstSamples, StageSeconds
from omni_async.types import Span


def taken(*spans: Span) -> dict[str, float]:
    stages = StageSeconds()
    stages.add(spans)
    return stages.take()


def span(actor: str, kind: str, start: float, end: float, **args: Any) -> Span:
    return Span(actor, kind, start, end, args)


def test_seconds_of_stages() -> None:
    together = [span("rollout-0", "generate", start, 10.0) for start in (0.0, 0.0, 4.0)]
    then = [span("rollout-0", "generate", 8.0, 16.0), span("rollout-1", "generate", 2.0, 5.0)]
    assert taken(*together, *then) == {"stage_s/generate": 16.0 + 3.0}, "samples drawn together count once"
    assert taken(
        span("trainer", "train", 0.0, 3.0, group=1, version=0),
        span("trainer", "train", 3.0, 3.5, step=0, version=0),
        span("trainer", "starved", 3.5, 5.5),
        span("reward-0", "starved", 0.0, 5.0),
        span("reward-0", "score", 5.0, 6.0),
        span("rollout-0", "swap", 5.0, 6.0),
    ) == {"stage_s/train": 3.0, "stage_s/step": 0.5, "stage_s/wait": 2.0, "stage_s/score": 1.0}


def test_what_was_taken_does_not_count_again_and_workers_that_were_replaced_are_forgotten() -> None:
    stages = StageSeconds()
    for began, ended, seconds in ((0.0, 4.0, 4.0), (1.0, 6.0, 2.0)):
        stages.add([span("rollout-0", "generate", began, ended)])
        assert stages.take() == {"stage_s/generate": pytest.approx(seconds)}
    assert stages.take() == {}
    for hour in range(1, 720):
        stages.add([span(f"rollout-0.{hour}", "generate", 3600.0 * hour, 3600.0 * hour + 1.0)])
        assert stages.take() == {"stage_s/generate": 1.0}
    assert len(stages._until) < 36


@pytest.mark.parametrize(
    ("scored", "told"),
    [
        (True, ["scoring the first samples", "training begins with the first whole group"]),
        (False, ["training begins with the first whole group"]),
    ],
)
def test_phases_before_the_first_update(scored: bool, told: list[str]) -> None:
    """A validation round, which is generated and scored first, is none of them."""
    lines: list[str] = []
    first = FirstSamples(lines.append, scored)
    first.add([span("rollout-0", "generate", 0.0, 1.0, sample="v0.p1.s0"), span("reward-0", "score", 1.0, 2.0)])
    assert lines == []
    for _ in range(2):
        first.add([span("rollout-0", "generate", 2.0, 3.0, sample="g0.s0")])
        first.add([span("reward-0", "score", 3.0, 4.0)])
    assert lines == told
