"""Tests trainer ranks that do not divide a group, as a user starts them: Ray actors over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_async.config import load
from tests.e2e.runs import check_every_group_ended_once, command_line, left_behind
from tests.e2e.sync_loop import train_synchronously

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]


@pytest.mark.parametrize(
    ("size", "correction"),
    [
        pytest.param(4, "{mode: bypass}", id="2 + 1 + 1 samples"),
        pytest.param(2, "{mode: decoupled, weights: tempered}", id="fewer samples than ranks, and a proximal pass"),
    ],
)
def test_three_ranks_train_what_one_trains(recipe: Path, size: int, correction: str) -> None:
    overrides = (
        "run.runtime=ray",
        "trainer.workers=3",
        f"rollout.group_size={size}",
        f"algorithm.correction={correction}",
        "placement.trainer.cpus=0.25",
        "placement.rollout.cpus=0.25",
        "placement.reward.cpus=0.25",
    )
    answer = command_line(recipe, *overrides, timeout=240)
    assert answer.code == 0, answer
    made = left_behind(recipe, overrides)
    check_every_group_ended_once(made)
    assert made.summary.updates == 3 and made.summary.staleness_max == 0
    assert all(line["grad_norm"] > 0 for line in made.metrics)
    assert all(("gamma" in line) == ("tempered" in correction) for line in made.metrics), "only these look before"
    weights, expected = made.weights(), train_synchronously(load(recipe, overrides))
    start = train_synchronously(load(recipe, [*overrides, "trainer.optimizer.lr=1e-30", "trainer.updates=1"]))
    assert max((weights[name] - expected[name]).abs().max().item() for name in expected) <= 1e-5
    assert max((weights[name] - start[name]).abs().max().item() for name in start) > 1e-3, "nothing was learnt"
