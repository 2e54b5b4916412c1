"""Tests which engine holds which weights, and what is refused; when a validation round is due, and what it counts."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from omni_async.control.requests import RequestFactory
from omni_async.control.reward_formula import RewardFormula
from omni_async.control.validation import Validation, ValidationRound
from omni_async.control.versions import Versions, WeightMismatch
from omni_async.types import Score, WeightReport
from tests.control.control_world import make_config, make_prompts, make_result


def versions(*engines: str, published: int = 0) -> Versions:
    v = Versions()
    v.trained = 10
    for engine in engines:
        v.join(engine)
    for version in range(published + 1):
        v.announce(version, f"d{version}")
    return v


def test_reports_of_unknown_engines_and_of_wrong_weights_are_refused_and_change_nothing() -> None:
    v = versions("a", published=1)
    with pytest.raises(WeightMismatch, match="engine z is not an engine of this run: a"):
        v.report(WeightReport("z", 0, "d0"))
    for version, digest in ((1, "x"), (7, "d7")):
        with pytest.raises(WeightMismatch):
            v.report(WeightReport("a", version, digest))
    assert v.engines == {"a": -1}


def test_versions_are_announced_in_order_and_after_their_update() -> None:
    v = Versions(3)
    v.announce(3, "d3")
    for version in (3, 2):
        with pytest.raises(ValueError, match=f"version {version} published after 3"):
            v.announce(version, "d")
    with pytest.raises(ValueError, match="version 4 published before its update was reported: the newest version is 3"):
        v.announce(4, "d4")
    v.trained = 5
    v.announce(5, "d5")
    assert v.published == 5


def test_digests_nobody_can_report_any_more_are_forgotten() -> None:
    v = versions("a", "b", published=3)
    v.report(WeightReport("a", 3, "d3"))
    v.report(WeightReport("b", 2, "d2"))
    v.report(WeightReport("b", 3, "d3"))
    assert v.published == 3
    with pytest.raises(WeightMismatch, match="never published"):
        v.report(WeightReport("b", 2, "d2"))


def test_a_newcomer_may_report_a_version_whose_digest_is_forgotten_and_holds_nothing() -> None:
    v = versions("a", published=2)
    v.report(WeightReport("a", 1, "d1"))
    v.join("b")
    v.report(WeightReport("a", 2, "d2"))
    v.report(WeightReport("b", 1, "d1"))
    assert v.of("b") == -1 and v.held == 2


def test_when_every_engine_was_lost_nobody_begins_with_what_they_had_left_behind() -> None:
    """Checks that a version left behind is refused: the slots of the groups that made version 2 are given out again."""
    v = versions("a", published=2)
    v.report(WeightReport("a", 1, "d1"))
    v.report(WeightReport("a", 2, "d2"))
    v.join("b")
    v.leave("a")
    assert v.held is None
    v.report(WeightReport("b", 1, "d1"))
    assert v.held is None and v.of("b") == -1
    v.report(WeightReport("b", 2, "d2"))
    assert v.held == 2


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
    round_ = ValidationRound(4, requests, num_shown=16)
    assert round_.versions == (4, 4) and round_.means() == {} and round_.num_missing == 4
    scores = (Score(1.0, {"ocr": 0.5}), Score(3.0, {"jpeg": 2.0}), None, None)
    for sample, version, score in zip(round_.samples, (4, 5, 5, 5), scores, strict=True):
        sample.result = make_result(sample.request, "rollout-0", (), version=version)
        sample.score = score
    assert round_.means() == {"reward": 2.0, "ocr": 0.5, "jpeg": 2.0}
    assert round_.standard_error() is None  # both are of one prompt
    round_.leave_out(round_.samples[2], "scorer 's': ValueError: no face")
    result = round_.result(RewardFormula(config.reward))
    assert (result.reward, result.parts, result.scored, result.asked) == (2.0, {"ocr": 0.5, "jpeg": 2.0}, 2, 4)
    assert result.reasons == {"no face": 1, "no reason was given": 1}
    assert result.scores == {
        "reward": (1.0, 3.0, None, None),
        "ocr": (0.5, None, None, None),
        "jpeg": (None, 2.0, None, None),
    }
    assert round_.versions == (4, 5)
    assert result.drawn == ValidationRound(8, requests, num_shown=16).result(RewardFormula(config.reward)).drawn
    other = replace(config.reward, gated=-1.0)
    assert result.drawn != round_.result(RewardFormula(other)).drawn
    moved = [replace(one, seed=one.seed + 1) for one in requests]
    assert result.drawn != ValidationRound(4, moved, num_shown=16).result(RewardFormula(config.reward)).drawn
    round_.samples[2].score = round_.samples[3].score = Score(8.0)
    assert round_.standard_error() == pytest.approx(
        3.0
    )  # prompts of 2 and 8: standard deviation 3 sqrt(2), over sqrt(2)
