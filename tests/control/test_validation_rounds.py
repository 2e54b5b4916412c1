"""Tests when a validation round is due, and what it counts."""

from __future__ import annotations

from control_world import make_config, make_prompts, make_result
from hypothesis import given
from hypothesis import strategies as st

from omni_async.control.requests import RequestFactory
from omni_async.control.validation import Validation, ValidationRound, ValidationSchedule
from omni_async.types import Score


def due(every: int, last: int, held: list[int]) -> list[int]:
    schedule = ValidationSchedule(every, last)
    return [version for version in held if schedule.due(version)]


def test_rounds_are_due_first_at_every_multiple_and_last() -> None:
    assert due(3, 7, list(range(8))) == [0, 3, 6, 7]
    assert due(1, 3, list(range(4))) == [0, 1, 2, 3]
    assert due(100, 4, list(range(5))) == [0, 4]


def test_a_version_is_validated_once_however_many_engines_report_it() -> None:
    assert due(2, 4, [0, 0, 1, 1, 2, 2, 2, 4, 4]) == [0, 2, 4]


def test_a_skipped_multiple_is_made_up_for_at_the_next_version() -> None:
    assert due(5, 20, [0, 3, 7, 9, 14, 20]) == [0, 7, 14, 20]


def test_a_resumed_run_starts_with_a_round() -> None:
    assert due(5, 20, [12, 14, 15]) == [12, 15]


@given(every=st.integers(1, 10), steps=st.lists(st.integers(0, 4), min_size=1))
def test_the_last_version_is_always_validated(every: int, steps: list[int]) -> None:
    held = [sum(steps[: i + 1]) for i in range(len(steps))]
    rounds = due(every, held[-1], held)
    assert rounds[0] == held[0] and rounds[-1] == held[-1]
    assert len(set(rounds)) == len(rounds)


def test_a_round_under_way_is_begun_again_by_a_run_that_goes_on_and_one_that_is_over_is_not() -> None:
    factory, prompts = RequestFactory(make_config(validation={"every": 3})), tuple(make_prompts(1))
    validation = Validation(ValidationSchedule(3, 9), lambda version: factory.validation(version, prompts))

    def due_after_a_checkpoint(version: int) -> bool:
        return ValidationSchedule(3, 9, validation.done).due(version)

    assert validation.begin(3) and validation.begin(6)
    assert due_after_a_checkpoint(3)
    del validation.rounds[3]
    assert due_after_a_checkpoint(6) and not due_after_a_checkpoint(3)
    del validation.rounds[6]
    assert not due_after_a_checkpoint(6) and due_after_a_checkpoint(9)


def test_means_are_over_scored_samples_only() -> None:
    config = make_config(validation={"every": 1, "samples_per_prompt": 2})
    requests = RequestFactory(config).validation(4, tuple(make_prompts(2)))
    round_ = ValidationRound(4, requests)
    assert round_.versions == (4, 4) and round_.means() == {} and round_.num_missing == 4
    scores = (Score(1.0, {"ocr": 0.5}), Score(3.0, {"jpeg": 2.0}), None, None)
    for sample, version, score in zip(round_.samples, (4, 5, 5, 5), scores, strict=True):
        sample.result = make_result(sample.request, "rollout-0", (), version=version)
        sample.score = score
    assert round_.means() == {"reward": 2.0, "ocr": 0.5, "jpeg": 2.0}
    assert round_.versions == (4, 5)
