"""Tests the numbers of an update's answers, from the coordinator's event to the driver's metrics."""

from __future__ import annotations

from omni_async.control.reporting import update_event
from omni_async.runtime.driver.update_numbers import answer_numbers
from omni_async.types import Prompt, ReadyGroup, ReadySample, Score, UpdateReport, VersionSpans
from tests.support.configs import build
from tests.support.token_family import AnswerSampling

SPANS = (((0, 3),), ((0, 3), (1, 4)), ((1, 90),))
GROUP = ReadyGroup(
    *(0, Prompt(0, "1 + 1"), None, 0),
    tuple(ReadySample(f"g0.s{i}", None, Score(1.0), VersionSpans(spans)) for i, spans in enumerate(SPANS)),
)


def test_an_update_of_tokens_has_lengths_and_versions_of_its_answers() -> None:
    report = UpdateReport(2, (0,), {}, 0.0, 1.0)
    data = update_event(report, [GROUP], build({}, {"rollout.sampling": AnswerSampling()}))
    assert data["answers"] == [(3, 1), (7, 2), (90, 1)]
    assert answer_numbers(data["answers"], 1.5) == {
        **{"tokens_per_s": 50, "answer_tokens/median": 7, "answer_tokens/p95": 90, "answer_versions": 4 / 3},
    }
    assert answer_numbers([(length, 1) for length in range(1, 21)], 1.0)["answer_tokens/p95"] == 19
    latents = update_event(report, [GROUP], build({}))
    assert "answers" not in latents and answer_numbers((), 1.5) == {}
