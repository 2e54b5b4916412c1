"""Tests that rows of several groups share micro-batches, and train what each group trains apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from omni_async.config import ConfigError
from omni_async.roles.plan import require_trainable
from omni_async.training import TrainingError
from omni_async.training.engine import TrainEngine
from omni_async.training.groups import GroupBatch, joined
from tests.support.fakes import tiny_group
from tests.training import training_world as world

SHARED = "trainer.groups_per_micro_batch"


def count(engine: TrainEngine) -> list[int]:
    """Returns a list that gets the rows of every micro-batch from now on."""
    rows: list[int] = []
    backward = engine._model.backward

    def counted(losses: Any, weight: float) -> None:
        rows.append(len(losses))
        backward(losses, weight)

    engine._model.backward = counted
    return rows


@pytest.mark.parametrize(("shared", "size", "rows"), [(1, 16, [8, 8]), (2, 16, [16]), (2, 12, [12, 4])])
def test_the_gradient_is_that_of_the_mean_loss_however_groups_share(shared, size, rows):
    engine, groups = world.moved(0.02, cfg=3.0, size=size, **{SHARED: shared})
    found = count(engine)

    def losses(steps: list[world.Step]) -> Any:
        return [world.surrogate(step.ratio, step.advantage) for step in steps]

    world.assert_trains(engine, groups, losses)
    assert found == rows


@pytest.mark.parametrize(
    "changes",
    [
        {"correction": {"mode": "decoupled", "weights": "importance", "normalise": True, "kappa_nats": 0.2}},
        {"name": "gspo", "fraction": 0.5},
        {**world.NFT, "kl_coef": 0.1},
    ],
)
def test_groups_that_share_are_trained_as_apart(changes):
    apart, groups = world.moved(size=16, **changes)
    shared, _ = world.moved(size=16, **changes, **{SHARED: 2})
    for engine in (apart, shared):
        if "correction" in changes:
            for group in groups:
                engine.recompute_proximal(group)
            world.nudge(engine)  # so that the pass differs from what is trained
    (metrics, gradients), (expected, of_apart) = world.trained(shared, *groups), world.trained(apart, *groups)
    world.assert_gradients(gradients, of_apart)
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_step_takes_groups_that_still_wait_and_discarding_forgets_them():
    engine, (first, second) = world.moved(size=16, **{SHARED: 2})
    rows = count(engine)
    engine.accumulate(first, 0.1)
    engine.discard()
    with pytest.raises(TrainingError, match="no group was accumulated"):
        engine.step()
    engine.accumulate(second, 0.1)
    assert rows == []
    engine.step()
    assert rows == [8]


def test_groups_of_different_buckets_do_not_share():
    buckets = [{"sampling": {"height": 32, "width": 48}}, {"sampling": {"height": 32, "width": 32}}]
    engine = world.engine(size=16, buckets=buckets, **{SHARED: 2})
    wide, square = engine.config.rollout.specs

    def drawn_by(spec: Any, seed: int) -> GroupBatch:
        one = world.make_config(sampling={"height": spec.height, "width": spec.width})
        return tiny_group(engine.policy, one, seed)

    rows = count(engine)
    assert (drawn_by(wide, 0).spec, drawn_by(square, 1).spec) == (wide, square)
    world.step_on(engine, drawn_by(wide, 0), drawn_by(square, 1), drawn_by(square, 2))
    assert rows == [8, 16]


def test_padding_is_dropped_where_a_rank_has_samples():
    _, (first, second) = world.moved()
    padding = [replace(group, counts=False) for group in (first, second)]
    both, alone = joined([padding[0], second]), joined(padding)
    assert (both.counts, both.size, both.seeds) == (True, 8, [*second.seeds])
    assert both.members == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert (alone.counts, alone.size, alone.seeds) == (False, 8, [*first.seeds])


def test_pairs_do_not_share():
    pairs = world.make_config(**{**world.NFT, "name": "diffusion_dpo", "correction": {}}, group_size=2, **{SHARED: 2})
    with pytest.raises(ConfigError, match=r"^trainer\.groups_per_micro_batch: diffusion_dpo deals the noise draws"):
        require_trainable(pairs)
