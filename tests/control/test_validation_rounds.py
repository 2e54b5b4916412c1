"""Tests when a validation round is due, and what it counts."""

from __future__ import annotations

from itertools import accumulate

import pytest
from control_world import make_config, make_prompts, make_result
from hypothesis import given
from hypothesis import strategies as st

from omni_async.control.requests import RequestFactory
from omni_async.control.validation import Validation, ValidationRound
from omni_async.types import Score


def make_validation(every: int, last: int, begun: int | None = None) -> Validation:
    config, prompts = make_config(updates=last, validation={"every": every}), tuple(make_prompts(1))
    return Validation(config, lambda version: RequestFactory(config).validation(version, prompts), begun)


def due(every: int, last: int, held: list[int]) -> list[int]:
    validation = make_validation(every, last)
    return [version for version in held if validation.begin(version)]


@pytest.mark.parametrize(
    ("every", "last", "held", "expected"),
    [
        pytest.param(3, 7, [*range(8)], [0, 3, 6, 7], id="the first, every multiple and the last"),
        pytest.param(1, 3, [*range(4)], [0, 1, 2, 3], id="all"),
        pytest.param(100, 4, [*range(5)], [0, 4], id="no multiple"),
        pytest.param(2, 4, [0, 0, 1, 1, 2, 2, 2, 4, 4], [0, 2, 4], id="once, however many engines report it"),
        pytest.param(5, 20, [0, 3, 7, 9, 14, 20], [0, 7, 14, 20], id="a skipped multiple at the next version"),
        pytest.param(5, 20, [12, 14, 15], [12, 15], id="the first of a resumed run"),
    ],
)
def test_rounds_are_due(every: int, last: int, held: list[int], expected: list[int]) -> None:
    assert due(every, last, held) == expected


@given(every=st.integers(1, 10), steps=st.lists(st.integers(0, 4), min_size=1))
def test_the_last_version_is_always_validated(every: int, steps: list[int]) -> None:
    held = [*accumulate(steps, initial=1)]
    rounds = due(every, held[-1], held)
    assert rounds[0] == held[0] and rounds[-1] == held[-1]
    assert len(set(rounds)) == len(rounds)


def test_a_round_under_way_is_begun_again_by_a_run_that_goes_on_and_one_that_is_over_is_not() -> None:
    validation = make_validation(3, 9)

    def due_after_a_checkpoint(version: int) -> bool:
        return make_validation(3, 9, validation.done).begin(version) is not None

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
