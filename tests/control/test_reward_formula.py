"""Tests how a reward is made of its scorers' values."""

from __future__ import annotations

from typing import Any

import pytest

from omni_async.config.reward import Reward, Scorer
from omni_async.control.reward_formula import NoReward, RewardFormula
from omni_async.types import Prompt, Score

INK = Prompt(0, "a cat", metadata={"style": "ink", "source": "text"})


def formula(*scorers: dict[str, Any], **reward: Any) -> RewardFormula:
    named = (Scorer(**{"name": "abc"[i], **one}) for i, one in enumerate(scorers))
    return RewardFormula(Reward(scorers=tuple(named), **reward))


def combined(made: RewardFormula, *values: float) -> float:
    return made.combine({i: Score(value) for i, value in enumerate(values)}).value


@pytest.mark.parametrize(
    ("scorers", "reward", "values", "expected"),
    [
        ([{"weight": 2.0}, {"weight": -1.0}], {}, (3.0, 4.0), 2.0),
        ([{"weight": 2.0}, {"weight": 0.5}], {"combine": "product"}, (3.0, 4.0), 18.0),
        ([{}, {"weight": 0.0}], {"combine": "product"}, (3.0, 0.0), 3.0),
        ([{"gate": 0.5}, {}], {"gated": -1.0}, (0.5, 4.0), 4.5),
        ([{"gate": 0.5}, {}], {"gated": -1.0}, (0.499, 4.0), -1.0),
        ([{"gate": 0.5, "weight": 0.0}, {}], {"combine": "product", "gated": 0.25}, (0.1, 4.0), 0.25),
    ],
)
def test_values_are_added_or_multiplied_and_a_gate_replaces_them(scorers, reward, values, expected):
    assert combined(formula(*scorers, **reward), *values) == expected


def test_components_count_in_place_of_the_value_each_with_its_weight_and_are_columns_of_their_own():
    made = formula({"weight": 2.0, "components": {"text": 1.0, "style": 0.5}}, {})
    score = made.combine({0: Score(9.0, {"text": 0.25, "style": 4.0, "more": 1.0}), 1: Score(1.0)})
    assert score.value == 2 * 0.25 + 2 * 0.5 * 4.0 + 1.0
    assert score.values == (0.25, 4.0, 1.0) and made.weights == [2.0, 1.0, 1.0]
    assert score.parts["a/value"] == 9.0 and score.parts["a/style"] == 4.0
    with pytest.raises(
        NoReward, match="scorer 'a': its score has no part 'style', which `components` names; it has text"
    ):
        made.combine({0: Score(9.0, {"text": 0.25}), 1: Score(1.0)})


@pytest.mark.parametrize(
    ("scorers", "reward", "values", "why"),
    [
        ([{}, {"weight": 1e6}], {}, (0.0, 2.0), "scorer 'b': a reward of 2e[+]06, beyond reward.max_abs = 1e[+]06"),
        ([{}, {}], {"max_abs": 3.0}, (2.0, 2.0), "the sum of all scorers: a reward of 4, beyond"),
        ([{}, {}], {"combine": "product"}, (-1.0, 2.0), "scorer 'a': a value of -1 .* has no place in a product"),
        ([{"weight": -1.0}, {}], {"combine": "product"}, (0.0, 2.0), "scorer 'a': a value of 0 .* has no place"),
        ([{"weight": 1e3}, {}], {"combine": "product"}, (1e9, 2.0), "scorer 'a': a reward of inf"),
        ([{"weight": 1e-200}, {}], {}, (1e160, 2.0), "scorer 'a': a value of 1e[+]160, beyond 1e[+]100"),
    ],
)
def test_what_makes_no_reward_is_refused_with_its_scorer(scorers, reward, values, why):
    with pytest.raises(NoReward, match=why):
        combined(formula(*scorers, **reward), *values)


def test_a_scorer_is_asked_where_the_prompts_metadata_fit_and_some_scorer_must_be():
    made = formula({"when": {"source": ("text", "scene")}}, {"when": {"source": "face"}}, {})
    assert made.asked(INK) == [0, 2] and made.asked(Prompt(1, "x")) == [2]
    score = made.combine({0: Score(1.0), 2: Score(2.0)})
    assert score.value == 3.0 and score.values == (1.0, None, 2.0)
    only = formula({"when": {"source": "face"}})
    assert only.missing(INK) == "no scorer is asked for it: none has a `when` that fits its metadata (source)"
    assert made.missing(INK) is None


def test_a_scorer_that_failed_one_sample_is_left_out_of_the_whole_group():
    made = formula({"gate": 0.5}, {"on_failure": "leave_out"}, {"when": {"source": "face"}, "on_failure": "leave_out"})
    whole = made.combine({0: Score(1.0), 1: Score(5.0)})
    half = made.combine({0: Score(2.0)})
    (first, second), left_out = made.level(INK, [whole, half])
    assert left_out == ("b",), "and a scorer that is not asked is not left out"
    assert (first.value, second.value) == (1.0, 2.0)
    assert (first.values, second.values) == ((1.0, None, None), (2.0, None, None))
    assert first.parts["b/value"] == 5.0, "what it said is still shown"
    assert made.level(INK, [whole, whole]) == ([whole, whole], ())
    assert made.unanswered(INK, whole) == [] and made.unanswered(INK, half) == ["b"], "a validation round leaves it out"
    gated = made.combine({0: Score(0.1), 1: Score(5.0)})
    assert made.level(INK, [gated, half])[0][0].value == 0.0


def test_a_group_for_which_no_scorer_is_left_has_no_reward():
    made = formula({"on_failure": "leave_out"}, {"on_failure": "leave_out"})
    one, other = made.combine({0: Score(1.0)}), made.combine({1: Score(1.0)})
    with pytest.raises(NoReward, match="no scorer has answered for every sample of the group"):
        made.level(INK, [one, other])
