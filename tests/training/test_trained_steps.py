"""Tests which of a window's steps are trained: a share of them, drawn by the sample's seed alone."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_async.algorithms.kinds import num_trained
from omni_async.training.engine import TrainEngine
from omni_async.training.groups import GroupBatch
from omni_async.training.transition_loss import trained_steps
from tests.fakes import TinyPolicy, tiny_group
from tests.training.engines import assert_gradients, log_probs, make_config, nudge, started, stepped
from tests.training.plain import gradients_of, model_of, steps_of, surrogate

WINDOW = range(0, 4)


@pytest.mark.parametrize(
    ("window", "fraction", "count"),
    [(4, 1.0, 4), (4, 0.5, 2), (4, 0.74, 2), (4, 0.01, 1), (10, 0.3, 3), (50, 0.58, 29), (3, 1 / 3, 1)],
)
def test_a_share_is_rounded_down_but_at_least_one(window, fraction, count):
    assert num_trained(window, fraction) == count


@given(seed=st.integers(0, 2**63 - 1), window=st.integers(1, 12), data=st.data())
def test_a_draw_is_without_replacement_in_order_and_the_seeds_alone(seed, window, data):
    fraction = data.draw(st.floats(0.01, 1.0))
    chosen = trained_steps(seed, window, fraction)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == num_trained(window, fraction)
    assert set(chosen) <= set(range(window))
    assert chosen == trained_steps(seed, window, fraction)
    assert trained_steps(seed, window, 1.0) == list(range(window))


def test_every_step_is_drawn_as_often_as_every_other():
    drawn = Counter(k for seed in range(3000) for k in trained_steps(seed, 4, 0.5))
    assert drawn.keys() == {0, 1, 2, 3}
    assert all(abs(count - 1500) < 5 * (3000 * 0.25) ** 0.5 for count in drawn.values())


def fractional(size: int = 3, **changes: object) -> tuple[TrainEngine, GroupBatch, list[list[int]]]:
    """Returns an engine that trains half of 4 steps, a group with a staleness of its own for every step, and the
    positions that are trained."""
    engine = started(make_config(**{"algorithm.timestep_fraction": 0.5, "trainer.micro_batch_size": size, **changes}))
    group = tiny_group(TinyPolicy(), engine.config, 0, WINDOW)
    group = replace(group, staleness=[[10 * i + k for k in WINDOW] for i in range(4)])
    nudge(engine)
    chosen = [trained_steps(seed, 4, 0.5) for seed in group.seeds]
    assert len(set(map(tuple, chosen))) > 1
    return engine, group, chosen


@pytest.mark.parametrize("size", [1, 3, 100])
def test_rows_are_the_chosen_steps_of_every_sample(size):
    engine, group, chosen = fractional(size)
    batches = [rows for rows, _ in engine._loss.batches(group)]
    expected = [(i, k) for i in range(4) for k in chosen[i]]
    assert [step for rows in batches for step in rows.steps] == [k for _, k in expected]
    assert [row_id for rows in batches for row_id in rows.row_ids] == [(i, n) for i in range(4) for n in (0, 1)]
    assert torch.cat([rows.staleness for rows in batches]).tolist() == [10 * i + k for i, k in expected]
    latents, following = (torch.cat([getattr(rows, name) for rows in batches]) for name in ("latents", "next_latents"))
    for row, (i, k) in enumerate(expected):
        assert torch.equal(latents[row], group.trajectories[i]["latents"][k])
        assert torch.equal(following[row], group.trajectories[i]["latents"][k + 1])


def test_the_gradient_is_that_of_the_mean_over_chosen_rows():
    engine, group, chosen = fractional()
    model = model_of(engine)
    losses = [
        surrogate((s.log_prob - s.recorded).exp(), s.advantage, 0.2)
        for s in steps_of(model, engine.config, group, chosen)
    ]
    engine.accumulate(group, 1 / 8)
    metrics, got = stepped(engine)
    assert_gradients(got, gradients_of(torch.stack(losses).mean(), model))
    assert metrics["loss"] == pytest.approx(torch.stack(losses).mean().item(), abs=1e-6)


def test_weights_and_drift_are_of_the_chosen_rows_in_order():
    engine, group, chosen = fractional(**{"algorithm.correction": {"mode": "decoupled"}})
    model = model_of(engine)
    steps = list(steps_of(model, engine.config, group, chosen))
    drifts = engine.recompute_proximal(group)
    assert [x for d in drifts for x in d.log_ratio] == pytest.approx([s.nats for s in steps], abs=2e-5)
    values = log_probs(engine, group)
    assert values.shape == (4, 2)
    torch.testing.assert_close(
        values.flatten().double(), torch.stack([s.log_prob for s in steps]).detach(), rtol=0, atol=1e-6
    )
    weight = [[0.5, 1.5], [0.0, 2.0], [1.0, 0.25], [0.75, 3.0]]
    flat = [w for row in weight for w in row]
    expected = gradients_of(
        torch.stack([-w * s.advantage * s.log_prob for w, s in zip(flat, steps, strict=True)]).mean(), model
    )
    engine.accumulate(replace(group, weights=weight), 1 / 8)
    assert_gradients(stepped(engine)[1], expected)
