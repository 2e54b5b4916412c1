"""Tests how long stages are said to have taken from update to update."""

from __future__ import annotations

from typing import Any

import pytest

from omni_async.records.write.stages import StageSeconds
from omni_async.types import Span


def taken(*spans: Span) -> dict[str, float]:
    stages = StageSeconds()
    stages.add(spans)
    return stages.take()


def span(actor: str, kind: str, start: float, end: float, **args: Any) -> Span:
    return Span(actor, kind, start, end, args)


def test_samples_that_an_engine_draws_together_count_once_and_engines_add_up() -> None:
    together = [span("rollout-0", "generate", start, 10.0) for start in (0.0, 0.0, 4.0)]
    then = [span("rollout-0", "generate", 8.0, 16.0), span("rollout-1", "generate", 2.0, 5.0)]
    assert taken(*together, *then) == {"stage_s/generate": 16.0 + 3.0}


def test_an_optimizer_step_is_no_training_of_a_group_and_only_the_trainers_wait_is_one() -> None:
    found = taken(
        span("trainer", "train", 0.0, 3.0, group=1, version=0),
        span("trainer", "train", 3.0, 3.5, step=0, version=0),
        span("trainer", "starved", 3.5, 5.5),
        span("reward-0", "starved", 0.0, 5.0),
        span("reward-0", "score", 5.0, 6.0),
        span("rollout-0", "swap", 5.0, 6.0),
    )
    assert found == {"stage_s/train": 3.0, "stage_s/step": 0.5, "stage_s/wait": 2.0, "stage_s/score": 1.0}


def test_what_was_taken_does_not_count_again_though_a_span_began_before() -> None:
    stages = StageSeconds()
    stages.add([span("rollout-0", "generate", 0.0, 4.0)])
    assert stages.take() == {"stage_s/generate": 4.0}
    stages.add([span("rollout-0", "generate", 1.0, 6.0)])
    assert stages.take() == {"stage_s/generate": pytest.approx(2.0)}
    assert stages.take() == {}


def test_workers_that_were_replaced_are_forgotten() -> None:
    stages = StageSeconds()
    hours = range(24 * 30)
    for hour in hours:
        stages.add([span(f"rollout-0.{hour}", "generate", 3600.0 * hour, 3600.0 * hour + 1.0)])
        assert stages.take() == {"stage_s/generate": 1.0}
    assert len(stages._until) < len(hours) / 20
