"""Tests that a combination of an objective and the rest of a recipe that cannot work is refused in one line, and others
are not."""

import pytest
from wrong_combinations import DPO, RIGHT, WRONG

from omni_async.algorithms.registry import objectives
from omni_async.algorithms.validation import problems
from tests.config.recipe import MINIMAL, load_text


@pytest.mark.parametrize(("overrides", "said"), WRONG)
def test_a_combination_that_cannot_work_is_one_line_that_names_the_key(overrides, said):
    [problem] = problems(load_text(MINIMAL, *overrides))
    assert said in problem
    assert "\n" not in problem
    key, _, reason = problem.partition(": ")
    assert key.split(".")[0] in ("algorithm", "data", "reward", "rollout", "trainer", "validation")
    assert reason


@pytest.mark.parametrize("overrides", RIGHT)
def test_what_can_work_is_not_objected_to(overrides):
    assert list(problems(load_text(MINIMAL, *overrides))) == []


def test_every_objective_is_among_what_can_work():
    assert {load_text(MINIMAL, *overrides).algorithm.name for overrides in RIGHT} == objectives().keys()


def test_everything_that_is_wrong_is_found():
    config = load_text(
        MINIMAL, *DPO, "rollout.group_size=1", "algorithm.kl_coef=0.1", "algorithm.clip_range=1e-4", "trainer.shard=2"
    )
    assert [problem.split(": ")[0] for problem in problems(config)] == [
        "algorithm.clip_range",
        "trainer.shard",
        "rollout.group_size",
        "algorithm.kl_coef",
    ]


def test_an_unknown_objective_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"^algorithm\.name: expected one of \['awm', .*'mix_grpo'\], got 'ppo'$"):
        list(problems(load_text(MINIMAL, "algorithm.name=ppo")))
