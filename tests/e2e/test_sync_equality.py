"""Tests that `staleness.max_updates: 0` is a plain loop, to the bit in one process, else within rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from omni_async.config import load
from omni_async.control.seeds import draw_window
from tests.e2e.sync_loop import train_synchronously
from tests.support.job_world import Run, run, trained

_ADAMW = ("trainer.optimizer.name=adamw", "trainer.optimizer.lr=1e-3")
_GLOBAL = ("algorithm.advantage.std=global", "trainer.streaming=off")


def largest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Returns the largest difference of two sets of weights."""
    assert a.keys() == b.keys()
    return torch.stack([(a[name] - b[name]).abs().max() for name in a]).max().item()


def check_equal(made: Run, recipe: Path, overrides: tuple[str, ...], *, within: float, learnt: float = 1e-3) -> None:
    made.check_every_group_ended_once()
    assert (made.summary.status, made.summary.updates, made.summary.staleness_max) == ("done", 3, 0)
    expected = train_synchronously(load(recipe, overrides))
    assert largest(made.weights(), expected) <= within
    start = train_synchronously(load(recipe, [*overrides, "trainer.optimizer.lr=1e-30", "trainer.updates=1"]))
    assert largest(made.weights(), start) > learnt, "nothing was learnt, so nothing was compared"


@pytest.mark.sliced(floor=2)
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(_GLOBAL, id="global std, collected"),
        pytest.param(("algorithm.advantage.std=group", "trainer.streaming=on"), id="group std, streaming"),
        pytest.param((*_GLOBAL, *_ADAMW), id="adamw"),
        pytest.param(
            (
                *("algorithm.advantage.std=group", "rollout.sde.kind=cps", "rollout.sampling.true_cfg_scale=2"),
                *("rollout.max_batch=3", *_ADAMW),
            ),
            id="cps, guided, batches across groups",
        ),
    ],
)
def test_staleness_zero_is_the_synchronous_loop_to_the_bit(recipe: Path, overrides: tuple[str, ...]) -> None:
    check_equal(run(recipe, *overrides), recipe, overrides, within=0.0)


def test_a_shared_prefix_changes_no_bit(recipe: Path) -> None:
    group = ("algorithm.advantage.std=group", "rollout.share_initial_noise=true", "rollout.max_batch=1")
    overrides = (*group, "rollout.share_prefix=true")
    made = run(recipe, *overrides)
    check_equal(made, recipe, overrides, within=0.0)
    c = load(recipe, overrides)
    first, sde = c.trainer.groups_per_update, c.rollout.sde
    assert sde is not None
    for line in made.metrics:
        groups = range((line["update"] - 1) * first, line["update"] * first)
        starts = [draw_window(c.run.seed, group, sde.window.size, sde.window.range).start for group in groups]
        share = sum(starts) * (1 - 1 / c.rollout.group_size) / (first * c.rollout.num_inference_steps)
        assert line["prefix/shared"] == pytest.approx(share)
    assert max(line["prefix/shared"] for line in made.metrics) > 0


def test_a_staleness_budget_gives_other_weights(recipe: Path) -> None:
    # All six groups that the budget allows are generated in one batch, by version 0.
    batch = ("algorithm.advantage.std=group", "trainer.updates=4", "rollout.max_inflight=24", "rollout.max_batch=24")
    synchronous, asynchronous = (run(recipe, *batch, f"staleness.max_updates={s}") for s in (0, 2))
    assert (synchronous.summary.staleness_max, asynchronous.summary.staleness_max) == (0, 2)
    assert largest(synchronous.weights(), asynchronous.weights()) > 0


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("how", [(), ("rollout.batching=request", "weights.swap=request")], ids=["step", "request"])
def test_staleness_zero_with_ray_and_vllm_omni_is_the_synchronous_loop(recipe: Path, how: tuple[str, ...]) -> None:
    real = ("run.runtime=ray", "rollout.engine=vllm_omni", *how)
    overrides = (*real, "reward.scorers=[{name: jpeg_size, params: {quality: 20}}]")
    made = trained(recipe, *overrides)
    assert max(line["log_ratio_nats/absmax"] for line in made.metrics) < 1e-2, "one policy update apart at most"
    check_equal(made, recipe, overrides, within=1e-5, learnt=1e-2)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("size", "correction"),
    [
        pytest.param(4, "{mode: bypass}", id="2 + 1 + 1 samples"),
        pytest.param(2, "{mode: decoupled, weights: tempered}", id="fewer samples than ranks, and a proximal pass"),
    ],
)
def test_three_ranks_on_ray_that_do_not_divide_a_group_train_what_one_trains(
    recipe: Path, size: int, correction: str
) -> None:
    quarters = (f"placement.{role}.cpus=0.25" for role in ("trainer", "rollout", "reward"))
    group = (f"rollout.group_size={size}", f"algorithm.correction={correction}")
    # Three ranks round otherwise than one, and most rewards would make something of a pixel's last bit.
    smooth = "reward.scorers=[{name: 'tests.e2e.scorers:Brightness'}]"
    overrides = ("run.runtime=ray", "trainer.workers=3", smooth, *group, *quarters)
    made = trained(recipe, *overrides)
    assert all(line["grad_norm"] > 0 for line in made.metrics)
    assert all(("gamma" in line) == ("tempered" in correction) for line in made.metrics), "only these look before"
    check_equal(made, recipe, overrides, within=1e-5)
