"""Tests that `staleness.max_updates: 0` is the synchronous trainer: all roles together give the weights of a plain
loop, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from omni_async.config import load
from tests.e2e.runs import check_every_group_ended_once, run
from tests.e2e.sync_loop import train_synchronously

_ADAMW = ("trainer.optimizer.name=adamw", "trainer.optimizer.lr=1e-3")


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("algorithm.advantage.std=global", "trainer.streaming=off"), id="global std, collected"),
        pytest.param(("algorithm.advantage.std=group", "trainer.streaming=on"), id="group std, streaming"),
        pytest.param(("algorithm.advantage.std=global", "trainer.streaming=off", *_ADAMW), id="adamw"),
        pytest.param(
            (
                "algorithm.advantage.std=group",
                "rollout.sde.kind=cps",
                "rollout.sampling.true_cfg_scale=2",
                "rollout.max_batch=3",
                *_ADAMW,
            ),
            id="cps, guided, batches across groups",
        ),
    ],
)
def test_staleness_zero_is_the_synchronous_loop_to_the_bit(recipe: Path, overrides: tuple[str, ...]) -> None:
    asynchronous = run(recipe, *overrides)
    assert asynchronous.summary.status == "done" and asynchronous.summary.updates == 3
    check_every_group_ended_once(asynchronous)
    weights, expected = asynchronous.weights(), train_synchronously(load(recipe, overrides))
    assert weights.keys() == expected.keys()
    different = {
        name: (weights[name] - expected[name]).abs().max().item()
        for name in expected
        if not torch.equal(weights[name], expected[name])
    }
    assert not different
    start = train_synchronously(load(recipe, [*overrides, "trainer.optimizer.lr=1e-30", "trainer.updates=1"]))
    assert max((weights[name] - start[name]).abs().max().item() for name in start) > 1e-3, (
        "nothing was learnt, so nothing was compared"
    )


def test_a_staleness_budget_gives_other_weights(recipe: Path) -> None:
    # All six groups that the budget allows are generated in one batch, by version 0.
    overrides = (
        "algorithm.advantage.std=group",
        "trainer.updates=4",
        "rollout.max_inflight=24",
        "rollout.max_batch=24",
    )
    synchronous, asynchronous = (run(recipe, *overrides, f"staleness.max_updates={s}") for s in (0, 2))
    assert synchronous.summary.staleness_max == 0 and asynchronous.summary.staleness_max == 2
    first, second = synchronous.weights(), asynchronous.weights()
    assert any(not torch.equal(first[name], second[name]) for name in first)
