"""Tests mode `auto` of the off-policy correction: the staleness budget decides, an explicit mode wins."""

from __future__ import annotations

import pytest
from recipe import MINIMAL, load_text

from omni_async.algorithms.correction.validation import problems
from omni_async.config.algorithm import Correction


@pytest.mark.parametrize("updates", [0, 2, 4])
def test_up_to_four_updates_the_ratio_is_taken_to_the_behaviour_policy(updates: int) -> None:
    assert load_text(MINIMAL, f"staleness.max_updates={updates}").correction == Correction(mode="bypass")


@pytest.mark.parametrize("updates", [5, 8])
def test_beyond_four_updates_weights_are_tempered_and_far_steps_masked(updates: int) -> None:
    chosen = load_text(MINIMAL, f"staleness.max_updates={updates}").correction
    assert (chosen.mode, chosen.weights, chosen.kappa_nats, chosen.normalises) == ("decoupled", "tempered", 2.0, True)
    assert list(problems(chosen)) == []


def test_an_explicit_mode_is_taken_as_it_is() -> None:
    config = load_text(MINIMAL, "staleness.max_updates=8", "algorithm.correction={mode: bypass, k3: 1.0}")
    assert config.correction == config.algorithm.correction == Correction(mode="bypass", k3=1.0)
